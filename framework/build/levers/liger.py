"""Liger's Triton kernels for the norms, MLPs and rotary positions of one model, and of no other.

Liger replaces names in transformers' modules: classes, and the function that rotates queries and keys, for every model
of the process. Here each name is restored, and the modules of this model that call a replaced function get their own
forward that uses Liger's.

Not used from Liger:
- its loss. Ours is a sum that is divided by the tokens of the global batch, and `model.chunked_loss` never builds the
  logits either, on any device, 12 ms (1B, 8,192 tokens) to 51 ms (0.6B, 16,384) faster on an H100
  (docs/evidence/speed.md);
- its experts, which support neither autocast nor frozen weights and synchronize with the host: transformers' own are
  used.
"""

import contextlib
import importlib.util
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from framework.build.hub import one_line
from framework.errors import Problem, RequestError
from framework.schema.model import ModelParams

KEY = "model.enable_liger_kernel"
INSTEAD = "false; training.compile=true fuses the same work in any model, and model.chunked_loss=true the loss"
_PACKAGE = "liger_kernel"
_ACTIVATIONS = {"SwiGLU": "silu", "Top2MLP": "silu", "GEGLU": "gelu_pytorch_tanh"}
"""Part of the name of Liger's MLP -> the activation that its kernel computes, whatever the model's own is."""


def refuse_unknown_to_liger(params: ModelParams, architecture: PretrainedConfig) -> None:
    """Raise RequestError, before anything is built, if Liger is not installed or does not support this model."""
    if params.enable_liger_kernel is not True:
        return
    missing = [name for name in (_PACKAGE, "triton") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing).replace("_", "-") + (" are" if len(missing) > 1 else " is")
        message = f"a plan needs the real package too, and {names} not installed"
        raise RequestError([Problem(KEY, message, expected=f"pip install liger-kernel triton, or {INSTEAD}")])
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if architecture.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        message = f"liger-kernel {version('liger-kernel')} has no kernels for {architecture.model_type}"
        raise RequestError([Problem(KEY, message, expected=INSTEAD)])


def use_liger_kernels(params: ModelParams, model: PreTrainedModel) -> None:
    """Replace modules of `model` by Liger's kernels, if requested. Names and weights do not change.

    Raises RequestError for a model whose MLPs have another activation than Liger's.
    """
    if params.enable_liger_kernel is not True:
        return
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # at its first rotation it warns about kernels of other vendors
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    try:
        with _names_put_back() as replaced:
            _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        message = f"liger-kernel {version('liger-kernel')} does not fit this {model.config.model_type}"
        raise RequestError([Problem(KEY, f"{message}: {one_line(error)}", expected=INSTEAD)]) from None
    for module in model.modules():
        kernel = _origin(module.forward)
        if kernel is None:
            # Only this module's forward uses the replaced functions.
            forward: Any = type(module).forward
            code = getattr(inspect.unwrap(forward), "__code__", None)
            called = {
                name: value
                for name, value in replaced.get(type(module).__module__, {}).items()
                if code is not None and name in code.co_names
            }
            if called:
                vars(module)["forward"] = MethodType(_finding(forward, called), module)
        elif kernel.endswith("Experts"):
            for attribute in ("forward", "_get_name"):
                vars(module).pop(attribute, None)
        else:
            _refuse_other_activation(module, kernel)


@contextlib.contextmanager
def _names_put_back() -> Iterator[dict[str, dict[str, Any]]]:
    """Context after which transformers' modules and torch.nn have their original names.

    Yields the replacements: module -> name of a function -> its replacement.
    """
    replaced: dict[str, dict[str, Any]] = {}
    files = [file for name, file in sys.modules.items() if name.startswith("transformers.models.")]
    owners: list[ModuleType] = [file for file in (*files, nn, nn.functional) if isinstance(file, ModuleType)]
    before = [dict(vars(owner)) for owner in owners]
    activations = dict(dict.items(ACT2FN))  # its own items() would instantiate each
    try:
        yield replaced
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name, value in names.items():
                new = vars(owner).get(name)
                if new is not value:
                    setattr(owner, name, value)
                    if inspect.isfunction(new):
                        replaced.setdefault(owner.__name__, {})[name] = new
        ACT2FN.update(activations)


def _finding(function: Any, names: Mapping[str, Any]) -> Any:
    """A copy of `function`, with its decorators, that sees `names` in place of its module's globals."""
    inner = getattr(function, "__wrapped__", None)
    cells: tuple[CellType, ...] = function.__closure__ or ()
    found = function.__globals__ if inner is not None else {**function.__globals__, **names}
    if inner is not None:
        copied = _finding(inner, names)
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    copy = FunctionType(function.__code__, found, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(copy).update(vars(function))
    if inner is not None and any(cell.cell_contents is copied for cell in cells):
        vars(copy)["__wrapped__"] = copied  # otherwise the decorator would call the original
    return copy


def _refuse_other_activation(module: nn.Module, name: str) -> None:
    own = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    computed = next((activation for part, activation in _ACTIVATIONS.items() if part in name), None)
    if own is None or computed is None or type(own) is type(ACT2FN[computed]):
        return
    message = f"Liger's MLP computes {computed}, and this model's activation is {type(own).__name__}"
    raise RequestError([Problem(KEY, message, expected=INSTEAD)])


def liger_kernels(module: nn.Module) -> Counter[str]:
    """Names of Liger's classes and functions used by `module` and its submodules, with counts."""
    return Counter(name for inner in module.modules() for name in _names_in(inner))


def _names_in(module: nn.Module) -> Iterator[str]:
    origin = _origin(module.forward)
    if origin is not None:
        yield origin
        return
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if not isinstance(function, FunctionType):
        return
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if inspect.isfunction(called) and called.__module__.startswith(f"{_PACKAGE}."):
            yield called.__name__


def _origin(forward: Any) -> str | None:
    """The Liger class of a forward; None if it is not Liger's."""
    function = getattr(forward, "__func__", forward)
    of_liger = str(getattr(function, "__module__", "")).startswith(f"{_PACKAGE}.")
    return str(function.__qualname__).partition(".")[0] if of_liger else None

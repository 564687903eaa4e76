"""Readers of the teacher or reference: exists, frozen, separate from the model, and unchanged by training."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from framework.build.adapters.quantize import kind_name, quantized_kinds, weight_count
from framework.build.assembly import Assembly
from framework.build.model.freeze import fingerprint
from framework.build.place import TORCH_DTYPES
from framework.build.tasks import reference_of
from framework.build.tasks.reference import Precomputed, WithFirstAdapter, WithoutAdapter
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import TorchDtype
from framework.schema.plural import counted


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the reference's and the trained weights before training."""

    fixed: int
    trained: int


def take_fingerprints(assembly: Assembly) -> Fingerprints | None:
    """None for tasks without a reference."""
    fixed = _fixed(assembly)
    return Fingerprints(fingerprint(fixed), fingerprint(assembly.trained)) if fixed else None


def fixed_fingerprint(assembly: Assembly) -> int | None:
    """Fingerprint of the reference's weights; None without one, and for sharded weights, which no rank has in full."""
    fixed = _fixed(assembly) if assembly.sharding is None else []
    return fingerprint(fixed) if fixed else None


def _fixed(assembly: Assembly) -> list[Tensor]:
    frozen_model: list[Tensor] = list(assembly.frozen_model.parameters()) if assembly.frozen_model is not None else []
    if isinstance(reference_of(assembly.objective), WithoutAdapter | WithFirstAdapter):
        return [*(item for item in assembly.model.parameters() if not item.requires_grad), *frozen_model]
    return frozen_model


KEY = "training.preference.loss_type"


def read_reference(assembly: Assembly) -> Iterator[Reading]:
    """The kind of a preference's reference, read from the objects that compute it."""
    training = assembly.config.training
    if not training.has_reference:
        return
    asked, found, source = "", "", "the objective"
    reference = reference_of(assembly.objective)
    if training.preference.precompute_reference:
        asked, found = "asked once", "asked once" if isinstance(reference, Precomputed) else "asked in each step"
    elif assembly.config.has_first_adapter:
        asked, source = "a frozen adapter", "its copies, their addresses, the optimizer's"
        is_first = isinstance(reference, WithFirstAdapter)
        found = _frozen(assembly, "adapter") if is_first else "something else"
    elif training.use_peft:
        asked, (found, source) = "the model without its adapter", _without_adapter(assembly, reference)
    else:
        asked, found, source = (
            "a frozen copy",
            _frozen(assembly, "copy"),
            "its parameters, their addresses, the optimizer's",
        )
    yield Reading(f"{KEY} = {training.preference.loss_type}, reference", asked, found, source)


def read_known_reference(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether the batches carried the reference's precomputed values."""
    asked = assembly.config.training.asks_reference_once
    if asked or step.has_reference:
        key = "training.preference.precompute_reference"
        yield Reading(key, str(asked).lower(), str(step.has_reference).lower(), "micro-batches of the first step")


def _without_adapter(assembly: Assembly, reference: object) -> tuple[str, str]:
    """Whether the reference disables the adapter, in all of its layers."""
    if not isinstance(reference, WithoutAdapter) or assembly.adapter is None:
        return "something else", "the objective"
    from peft.tuners.tuners_utils import BaseTunerLayer  # takes seconds to import

    model = assembly.adapter.model
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    with model.disable_adapter():
        off = sum(layer.disable_adapters for layer in layers)
    on = sum(not layer.disable_adapters for layer in layers)
    is_switched = off == on == len(layers)
    found = "the model without its adapter" if is_switched else f"{off} of {counted(len(layers), 'layer')} without it"
    return found, f"{off} of {counted(len(layers), 'layer')} off for the reference, {on} on again"


def read_teacher(assembly: Assembly) -> Iterator[Reading]:
    """The teacher of a distillation: frozen, in eval mode, separate from the model, in its dtype."""
    teacher, frozen_model = assembly.config.training.teacher, assembly.frozen_model
    if teacher is None:
        return
    parameters = list(frozen_model.parameters()) if frozen_model is not None else []
    kinds = quantized_kinds(frozen_model) if frozen_model is not None else Counter[str]()
    held = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    wanted = TORCH_DTYPES.get(teacher.torch_dtype_str or TorchDtype.AUTO)
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in held))
    count = sum(map(weight_count, parameters))
    yield Reading(
        "training.teacher", "a frozen model", _frozen(assembly, "model"), f"{counted(count, 'parameter')}, {dtypes}"
    )
    if wanted is not None:
        found = str(teacher.torch_dtype_str) if held == {wanted} else dtypes
        yield Reading("training.teacher.torch_dtype_str", str(teacher.torch_dtype_str), found, "its parameters")
    if teacher.bits is not None or kinds:
        asked = kind_name(teacher.bits, "nf4", False) if teacher.bits is not None else "not quantized"
        source = f"{counted(kinds.total(), 'linear layer')} of the teacher"
        yield Reading("training.teacher.bits", asked, ", ".join(kinds) or "not quantized", source)


def _frozen(assembly: Assembly, what: str) -> str:
    """`a frozen copy`, or its faults."""
    frozen_model = assembly.frozen_model
    if frozen_model is None:
        return "none"
    own = list(frozen_model.parameters())
    trained = {id(p) for group in assembly.optimizer.param_groups for p in group["params"]}
    shared = {p.data_ptr() for p in assembly.model.parameters() if p.numel()}
    faults = {
        "with gradients": any(p.requires_grad for p in own),
        "in the optimizer": any(id(p) in trained for p in own),
        "sharing weights with the model": any(p.data_ptr() in shared for p in own if p.numel()),
        "in training mode": any(module.training for module in frozen_model.modules()),
    }
    wrong = [fault for fault, holds in faults.items() if holds]
    return f"a {what} {', '.join(wrong)}" if wrong else f"a frozen {what}"


def read_moved(assembly: Assembly, before: Fingerprints | None) -> Iterator[Reading]:
    """After training: the reference (or the base as reference) is unchanged bit for bit, and the model is not."""
    if before is None:
        return
    now = take_fingerprints(assembly)
    assert now is not None
    result = "unmoved" if now.fixed == before.fixed else "moved"
    what = "reference: base under the adapter" if assembly.frozen_model is None else "reference"
    what = "teacher" if assembly.config.training.teacher is not None else what
    moved = "moved" if now.trained != before.trained else "has not moved"
    yield Reading(
        f"reference ({what})", "unmoved", result, f"sum of its bits {now.fixed:016x}; the trained model {moved}"
    )

"""The optimizer that steps, and what it keeps for each trained tensor."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers.optimization import Adafactor

from framework.build.assembly import Assembly
from framework.build.optimizer import RATE_FACTOR
from framework.build.optimizers import codes
from framework.build.optimizers.any_precision import AnyPrecisionAdamW
from framework.build.optimizers.lion import Lion
from framework.build.optimizers.low_bit import LOW_BIT, LowBit, is_managed, low_bit_class, parts_of
from framework.build.optimizers.low_rank import LowRankAdamW
from framework.build.optimizers.matrices import matrices_apart
from framework.build.optimizers.muon import MuonWithAdamW
from framework.build.optimizers.parameter_wise import ParameterWise, is_large
from framework.build.optimizers.schedule_free import ScheduleFreeAdamW
from framework.build.optimizers.sophia import SophiaG
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import OptimizerOffload, Rounding
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams
from framework.schema.wording import counted

_CLASSES: Mapping[Optimizer, type[torch.optim.Optimizer]] = {
    Optimizer.ADAMW_TORCH: torch.optim.AdamW,
    Optimizer.ADAMW_TORCH_FUSED: torch.optim.AdamW,
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAFACTOR: Adafactor,
    Optimizer.LION: Lion,
    Optimizer.SOPHIA: SophiaG,
    Optimizer.ANYPRECISION_ADAMW: AnyPrecisionAdamW,
    Optimizer.ANYPRECISION_ADAMW_8BIT: AnyPrecisionAdamW,
    Optimizer.MUON: MuonWithAdamW,
    Optimizer.GALORE_ADAMW: LowRankAdamW,
    Optimizer.APOLLO_ADAMW: LowRankAdamW,
    Optimizer.SCHEDULE_FREE_ADAMW: ScheduleFreeAdamW,
}

_Kind = tuple[str, str]
"""Name of a state and what it is made of: its dtype, and `managed` where it lies in managed memory."""


def read_optimizer(assembly: Assembly) -> Iterator[Reading]:
    """Its class, its implementation, and that it holds every trained tensor."""
    asked = Optimizer(assembly.config.training.optimizer)
    optimizer = assembly.optimizer
    parts = list(optimizer.parts.values()) if isinstance(optimizer, ParameterWise) else [optimizer]
    if assembly.from_python.optimizer is not None:
        key, wanted, found, about = "optimizer", type(optimizer).__name__, type(optimizer).__name__, ", from Python"
    else:
        key, wanted, found, about = "training.optimizer", str(asked), _name(asked, parts[0]), _share_apart(assembly)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in held for parameter in assembly.trained)
    if missing:
        found = f"{found} without {missing} of the trained tensors"
    yield Reading(key, wanted, found, f"{type(parts[0]).__name__} groups{about}")


def _share_apart(assembly: Assembly) -> str:
    """How much of what is trained an optimizer of matrices treats as such."""
    apart = matrices_apart(assembly.config.training, assembly.model)
    if not apart:
        return ""
    share = sum(matrix.numel() for matrix in apart) / sum(parameter.numel() for parameter in assembly.trained)
    others = "; AdamW has the others" if len(apart) < len(assembly.trained) else ""
    return f": {counted(len(apart), 'matrix', 'matrices')}, {share:.0%} of the trained weights{others}"


def _name(asked: Optimizer, optimizer: torch.optim.Optimizer) -> str:
    """The name of what was built, as far as it differs from what was asked."""
    wanted = low_bit_class(asked) if asked in LOW_BIT else _CLASSES[asked]
    if type(optimizer) is not wanted:
        return type(optimizer).__name__
    if bool(optimizer.defaults.get("fused")) != (asked is Optimizer.ADAMW_TORCH_FUSED):
        return "adamw_torch_fused" if optimizer.defaults.get("fused") else "adamw_torch"
    if isinstance(optimizer, LowRankAdamW) and optimizer.apollo != (asked is Optimizer.APOLLO_ADAMW):
        return "apollo_adamw" if optimizer.apollo else "galore_adamw"
    if isinstance(optimizer, AnyPrecisionAdamW):
        return str(Optimizer.ANYPRECISION_ADAMW_8BIT if optimizer.state_bits == 8 else Optimizer.ANYPRECISION_ADAMW)
    return str(asked)


def read_optimizer_in_backward(assembly: Assembly) -> Iterator[Reading]:
    """Whether each trained tensor has an optimizer of its own, which the step calls in backward."""
    asked, optimizer = assembly.config.training.optimizer_in_backward, assembly.optimizer
    own = len(optimizer.parts) if isinstance(optimizer, ParameterWise) else 0
    found = own == len(assembly.trained) if asked is True else False
    yield Reading(
        "training.optimizer_in_backward", str(asked), str(found), f"{counted(own, 'optimizer')} of one tensor"
    )


def read_rounding(assembly: Assembly) -> Iterator[Reading]:
    """How AnyPrecisionAdamW rounds."""
    optimizer = assembly.optimizer
    part = next(iter(optimizer.parts.values())) if isinstance(optimizer, ParameterWise) else optimizer
    if isinstance(part, AnyPrecisionAdamW):
        asked = assembly.config.training.rounding or Rounding.STOCHASTIC
        yield Reading("training.rounding", str(asked), str(part.rounding), "AnyPrecisionAdamW.rounding")


def read_optimizer_states(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Names and dtypes of the states, which optimizers make in their first step, and bytes a trained parameter."""
    found: Counter[_Kind] = Counter()
    size = 0
    for parameter in assembly.trained:
        for name, value in assembly.optimizer.state.get(parameter, {}).items():
            for inner, tensor in parts_of(value):
                size += tensor.numel() * tensor.element_size()
                if tensor.dim():
                    found[f"{name}.{inner}" if inner else name, _made_of(tensor.dtype, is_managed(tensor))] += 1
    per_parameter = f"{size / max(1, sum(item.numel() for item in assembly.trained)):.2f} bytes a trained parameter"
    if assembly.from_python.optimizer is not None:
        yield Reading("optimizer states", None, _worded(found), per_parameter)
        yield _read_groups(assembly.optimizer)
        return
    apart = matrices_apart(assembly.config.training, assembly.model)
    wanted = Counter(kind for parameter in assembly.trained for kind in _expected(assembly, parameter, apart))
    yield Reading("optimizer states", _worded(wanted), _worded(found), per_parameter)


def _read_groups(optimizer: torch.optim.Optimizer) -> Reading:
    """That an optimizer keeps its states with the parameters: a checkpoint has none of what changes in its groups."""
    ours = {"params", "lr", "weight_decay", RATE_FACTOR}
    moved = {
        name
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ours and (isinstance(value, Tensor) or value != optimizer.defaults.get(name))
    }
    asked = "each with its parameter"
    found = f"in its groups: {', '.join(sorted(moved))}" if moved else asked
    return Reading("optimizer states kept", asked, found, "param_groups after a step; a checkpoint has states alone")


def read_offloaded_states(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Where the states are after a step."""
    asked, optimizer = assembly.config.training.optimizer_offload, assembly.optimizer
    held = away = 0
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if is_large(value):
                held += 1
                away += isinstance(optimizer, ParameterWise) and optimizer.held[parameter].get(name) is value
    found = (
        str(asked) if away == (0 if asked is OptimizerOffload.NONE else held) else f"{away} of {counted(held, 'state')}"
    )
    yield Reading("training.optimizer_offload", str(asked), found, f"{away} of {counted(held, 'state')} off the device")


def _made_of(dtype: torch.dtype, managed: bool = False) -> str:
    return str(dtype).removeprefix("torch.") + (" managed" if managed else "")


def _worded(counted: Counter[_Kind]) -> str:
    return ", ".join(f"{name} {kind} x {counted[name, kind]}" for name, kind in sorted(counted)) or "none"


def _expected(assembly: Assembly, parameter: Tensor, apart: frozenset[Tensor]) -> Iterator[_Kind]:
    """The states that one trained tensor should have after a step, `apart` being those treated as matrices."""
    training, own = assembly.config.training, _made_of(parameter.dtype)
    match Optimizer(training.optimizer):
        case Optimizer.SGD:
            names = ["momentum_buffer"] if training.sgd_momentum else []
        case Optimizer.ADAFACTOR:
            own, names = "float32", ["exp_avg_sq_row", "exp_avg_sq_col"] if parameter.dim() > 1 else ["exp_avg_sq"]
        case Optimizer.LION:
            names = ["exp_avg"]
        case Optimizer.SOPHIA:
            names = ["exp_avg", "hessian"]
        case Optimizer.SCHEDULE_FREE_ADAMW:
            names = ["z", "exp_avg_sq"]
        case Optimizer.ANYPRECISION_ADAMW | Optimizer.ANYPRECISION_ADAMW_8BIT:
            yield from _expected_any_precision(training, parameter)
            return
        case Optimizer.MUON:
            names = ["momentum_buffer"] if parameter in apart else ["exp_avg", "exp_avg_sq"]
        case Optimizer.GALORE_ADAMW:
            names = ["exp_avg", "exp_avg_sq", *(["projection"] if parameter in apart else [])]
        case choice if choice in LOW_BIT:
            on_card = assembly.place.kind == "cuda"
            yield from _expected_codes(LOW_BIT[choice], parameter, on_card)
            return
        case _:
            names = ["exp_avg", "exp_avg_sq"]
    yield from ((name, own) for name in names)


def _expected_any_precision(training: TrainingParams, parameter: Tensor) -> Iterator[_Kind]:
    is_coded = training.optimizer is Optimizer.ANYPRECISION_ADAMW_8BIT and parameter.numel() >= codes.SMALLEST
    for name in ("exp_avg", "exp_avg_sq"):
        yield name, "uint8" if is_coded else "bfloat16"
        if is_coded:
            yield f"{name}_scales", "float32"
    if training.rounding is Rounding.KAHAN and parameter.dtype is torch.bfloat16:
        yield "compensation", "bfloat16"


def _expected_codes(row: LowBit, parameter: Tensor, on_card: bool) -> Iterator[_Kind]:
    coded, paged = row.is_coded(parameter.numel()), on_card and row.is_paged(parameter.numel())
    if row.even:
        for name in ("exp_avg", "exp_avg_sq"):
            inner = [("codes", "uint8"), ("scale", "float32"), ("qmap", "float32")]
            yield from (
                ((f"{name}.{part}", kind) for part, kind in inner) if coded else [(name, _made_of(parameter.dtype))]
            )
        return
    for number in range(1, row.states + 1):
        yield f"state{number}", _made_of(torch.uint8 if coded else torch.float32, paged)
        if coded:
            yield f"absmax{number}", "float32"
            yield f"qmap{number}", "float32"

"""Readers of the optimizer in use and its states for each trained tensor."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.model.freeze import matches
from framework.build.optimizers.any_precision import AnyPrecisionAdamW
from framework.build.optimizers.build import RATE_FACTOR, decays, matrix_parameters
from framework.build.optimizers.low_bit import is_managed, parts_of
from framework.build.optimizers.parameter_wise import ParameterWise, moves
from framework.build.optimizers.row import Looked, State, made_of, rows_beside
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.ranks import local_part
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import EmaDevice, OptimizerOffload, Rounding
from framework.schema.optimizers import Optimizer
from framework.schema.plural import counted


def read_optimizer(assembly: Assembly) -> Iterator[Reading]:
    """Its class and implementation, and whether it has every trained tensor."""
    asked = Optimizer(assembly.config.training.optimizer)
    optimizer = assembly.optimizer
    parts = list(optimizer.parts.values()) if isinstance(optimizer, ParameterWise) else [optimizer]
    if assembly.from_python.optimizer is not None:
        key, wanted, found, about = "optimizer", type(optimizer).__name__, type(optimizer).__name__, ", from Python"
    else:
        key, wanted, rows = "training.optimizer", str(asked), rows_beside(asked)
        others = (str(choice) for choice, row in rows.items() if choice is not asked and row.is_one(parts[0]))
        found = wanted if rows[asked].is_one(parts[0]) else next(others, type(parts[0]).__name__)
        about = _share_apart(assembly)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in held for parameter in assembly.trained)
    if missing:
        found = f"{found} without {missing} of the trained tensors"
    yield Reading(key, wanted, found, f"{type(parts[0]).__name__} groups{about}")


def _share_apart(assembly: Assembly) -> str:
    """Share of the trained weights that an optimizer of matrices treats as matrices."""
    matrices = matrix_parameters(assembly.config.training, assembly.model)
    if not matrices:
        return ""
    share = sum(matrix.numel() for matrix in matrices) / sum(parameter.numel() for parameter in assembly.trained)
    others = "; AdamW has the others" if len(matrices) < len(assembly.trained) else ""
    return f": {counted(len(matrices), 'matrix', 'matrices')}, {share:.0%} of the trained weights{others}"


def read_parameter_groups(assembly: Assembly) -> Iterator[Reading]:
    """The rate and decay of the trained weights that each pattern matches, without LoRA+'s factor."""
    training, ratio = assembly.config.training, assembly.config.peft.lora_plus_lr_ratio
    held = {id(item): group for group in assembly.optimizer.param_groups for item in group["params"]}
    for index, asked in enumerate(training.parameter_groups):
        found = Counter[str]()
        for name, parameter in assembly.model.named_parameters():
            if id(parameter) in held and decays(name) and matches(asked.match, name):
                group, faster = held[id(parameter)], ratio if training.use_peft and "lora_B" in name else None
                rate = group.get(RATE_FACTOR, 1.0) * training.learning_rate / (faster or 1.0)
                found[f"rate {rate:g}, decay {group['weight_decay']:g}"] += 1
        rate = training.learning_rate if asked.learning_rate is None else asked.learning_rate
        decay = training.weight_decay if asked.weight_decay is None else asked.weight_decay
        wanted = f"rate {rate:g}, decay {decay:g}"
        source = f"groups of {counted(found.total(), 'weight')} that {asked.match} matches"
        yield Reading(f"training.parameter_groups[{index}]", wanted, " and ".join(sorted(found)) or wanted, source)


def read_optimizer_in_backward(assembly: Assembly) -> Iterator[Reading]:
    """Whether each trained tensor has its own optimizer, called in backward."""
    asked, optimizer = assembly.config.training.optimizer_in_backward, assembly.optimizer
    own = len(optimizer.parts) if isinstance(optimizer, ParameterWise) else 0
    found = own == len(assembly.trained) if asked is True else False
    source = f"{counted(own, 'optimizer')} of one tensor"
    yield Reading("training.optimizer_in_backward", str(asked).lower(), str(found).lower(), source)


def read_rounding(assembly: Assembly) -> Iterator[Reading]:
    """AnyPrecisionAdamW's rounding."""
    optimizer = assembly.optimizer
    part = next(iter(optimizer.parts.values())) if isinstance(optimizer, ParameterWise) else optimizer
    if isinstance(part, AnyPrecisionAdamW):
        asked = assembly.config.training.rounding or Rounding.STOCHASTIC
        yield Reading("training.rounding", str(asked), str(part.rounding), "AnyPrecisionAdamW.rounding")


def read_optimizer_states(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Names and dtypes of the states, created in the first step, and bytes per trained parameter."""
    found: Counter[State] = Counter()
    size = 0
    for parameter in assembly.trained:
        for name, value in assembly.optimizer.state.get(parameter, {}).items():
            if name == AVERAGE:
                continue
            for inner, tensor in parts_of(value):
                size += tensor.numel() * tensor.element_size()
                if tensor.dim():
                    found[f"{name}.{inner}" if inner else name, made_of(tensor.dtype, is_managed(tensor))] += 1
    per_parameter = f"{size / max(1, sum(item.numel() for item in assembly.trained)):.2f} bytes a trained parameter"
    if assembly.from_python.optimizer is not None:
        yield Reading("optimizer states", None, _worded(found), per_parameter)
        yield _read_groups(assembly.optimizer)
        return
    matrices = matrix_parameters(assembly.config.training, assembly.model)
    asked, on_card = Optimizer(assembly.config.training.optimizer), assembly.place.kind == "cuda"
    states = rows_beside(asked)[asked].states
    looked = (Looked(parameter, parameter in matrices, on_card) for parameter in assembly.trained)
    wanted = Counter(state for each in looked for state in states(assembly.config.training, each))
    yield Reading("optimizer states", _worded(wanted), _worded(found), per_parameter)


def _read_groups(optimizer: torch.optim.Optimizer) -> Reading:
    """Whether the optimizer's states belong to parameters: a checkpoint has no values that change in its groups."""
    ours = {"params", "lr", "weight_decay", RATE_FACTOR}
    moved = {
        name
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ours and (isinstance(value, Tensor) or value != optimizer.defaults.get(name))
    }
    asked = "each with its parameter"
    found = f"in its groups: {', '.join(sorted(moved))}" if moved else asked
    return Reading("optimizer states kept", asked, found, "param_groups after a step; a checkpoint has only states")


def read_weights_average(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Number of trained tensors with a moving average, and its device."""
    training, optimizer = assembly.config.training, assembly.optimizer
    if training.ema_decay is None:
        return
    found = [optimizer.state.get(parameter, {}).get(AVERAGE) for parameter in assembly.trained]
    kept = [average for average in found if average is not None]
    on_host = sum(average.device.type == "cpu" for average in kept)
    is_there = "host" if assembly.place.kind != "cpu" and on_host else "device"
    wanted = EmaDevice.DEVICE if assembly.place.kind == "cpu" else training.ema_device
    asked = f"{training.ema_decay:g} on the {wanted}, of {counted(len(found), 'tensor')}"
    size = sum(local_part(average).nbytes for average in kept)
    had = f"{training.ema_decay:g} on the {is_there}, of {counted(len(kept), 'tensor')}"
    yield Reading("training.ema_decay", asked, had, f"averages kept with the states, {size:,} bytes")


def read_offloaded_states(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Device of the states after a step."""
    asked, optimizer = assembly.config.training.optimizer_offload, assembly.optimizer
    held = away = 0
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if moves(name, value):
                held += 1
                away += isinstance(optimizer, ParameterWise) and optimizer.held[parameter].get(name) is value
    found = (
        str(asked) if away == (0 if asked is OptimizerOffload.NONE else held) else f"{away} of {counted(held, 'state')}"
    )
    yield Reading("training.optimizer_offload", str(asked), found, f"{away} of {counted(held, 'state')} off the device")


def _worded(counted: Counter[State]) -> str:
    return ", ".join(f"{name} {kind} x {counted[name, kind]}" for name, kind in sorted(counted)) or "none"

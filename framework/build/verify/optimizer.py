"""The optimizer that steps, and what it keeps for each trained tensor."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.optimization import Adafactor

from framework.build.assembly import Assembly
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import Optimizer

_CLASSES = {
    Optimizer.ADAMW_TORCH: torch.optim.AdamW,
    Optimizer.ADAMW_TORCH_FUSED: torch.optim.AdamW,
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAFACTOR: Adafactor,
}

_STATES = {
    Optimizer.ADAMW_TORCH: ("exp_avg", "exp_avg_sq"),
    Optimizer.ADAMW_TORCH_FUSED: ("exp_avg", "exp_avg_sq"),
    Optimizer.SGD: (),
}
"""States that each trained tensor has after a step, in its own dtype and shape. Others choose by shape."""


def read_optimizer(assembly: Assembly) -> Iterator[Reading]:
    """Its class, its implementation, and that it holds every trained tensor."""
    asked = assembly.config.training.optimizer
    defaults = assembly.optimizer.defaults
    found = str(asked)
    if type(assembly.optimizer) is not _CLASSES[Optimizer(asked)]:
        found = type(assembly.optimizer).__name__
    elif bool(defaults.get("fused")) != (asked is Optimizer.ADAMW_TORCH_FUSED):
        found = "adamw_torch_fused" if defaults.get("fused") else "adamw_torch"
    held = {id(parameter) for group in assembly.optimizer.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in held for parameter in assembly.trained)
    if missing:
        found = f"{found} without {missing} of the trained tensors"
    yield Reading("training.optimizer", str(asked), found, f"{type(assembly.optimizer).__name__} groups")


def read_optimizer_states(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Names and dtypes of the states, which optimizers make in their first step, and bytes a trained parameter."""
    asked = Optimizer(assembly.config.training.optimizer)
    states, trained = assembly.optimizer.state, assembly.trained
    tensors = [value for item in trained for value in states.get(item, {}).values() if isinstance(value, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    per_parameter = f"{size / max(1, sum(item.numel() for item in trained)):.2f} bytes a trained parameter"
    found = ", ".join(_dtypes(assembly))
    wanted = ", ".join(_expected(assembly, _STATES[asked])) if asked in _STATES else None
    yield Reading("optimizer states", wanted if wanted is None else wanted or "none", found or "none", per_parameter)


def _dtypes(assembly: Assembly) -> Iterator[str]:
    """`exp_avg float32 x 12` for each state and dtype; the scalar step count is left out."""
    counted = Counter[tuple[str, torch.dtype]]()
    for parameter in assembly.trained:
        for name, value in assembly.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                counted[name, value.dtype] += 1
    yield from _worded(counted)


def _expected(assembly: Assembly, names: tuple[str, ...]) -> Iterator[str]:
    counted = Counter((name, parameter.dtype) for parameter in assembly.trained for name in names)
    yield from _worded(counted)


def _worded(counted: Counter[tuple[str, torch.dtype]]) -> Iterator[str]:
    for name, dtype in sorted(counted, key=str):
        yield f"{name} {str(dtype).removeprefix('torch.')} x {counted[name, dtype]}"

"""Conversion of an optimizer's states to plain named tensors and numbers, and back, wherever the optimizer keeps
them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.assembly import Assembly
from framework.build.optimizers.low_bit import parts_of
from framework.build.optimizers.parameter_wise import ParameterWise
from framework.build.optimizers.weights_average import AVERAGE
from framework.schema.choices import EmaDevice
from framework.schema.optimizers import facts_of

SEPARATOR = "::"
"""Separates a parameter's name from that of its state."""
_MOMENTS = (("exp_avg", "state1"), ("exp_avg_sq", "state2"))
"""Names of torch's AdamW and of bitsandbytes'."""


def flat_state(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States by parameter name: tensors for safetensors, plain numbers for JSON.

    A torchao state is a tensor composed of tensors; each inner one gets a name of its own. A state that all parameters
    share (a code book) is copied, since safetensors refuses shared tensors.
    """
    if assembly.place.kind == "cuda":
        torch.cuda.synchronize()  # pending copies to the host, and paged states, must have arrived
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    seen: set[int] = set()
    for name, parameter in assembly.model.named_parameters():
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            path = f"{name}{SEPARATOR}{key}"
            if not isinstance(value, Tensor):
                numbers[path] = value
            for inner, tensor in parts_of(value):
                shared = tensor.data_ptr() in seen
                seen.add(tensor.data_ptr())
                tensors[f"{path}{SEPARATOR}{inner}" if inner else path] = (
                    tensor.clone() if shared else tensor.contiguous()
                )
    return tensors, numbers


def restore_state(assembly: Assembly, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Load the result of `flat_state` into the optimizer, replacing its states if it has any."""
    parameters, optimizer = dict(assembly.model.named_parameters()), assembly.optimizer
    for path, value in renamed(assembly, {**tensors, **numbers}).items():
        name, key, *inner = path.split(SEPARATOR)
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if inner:
            if key not in state:
                state[key] = optimizer._new_buffer(parameter, key == "exp_avg")  # type: ignore[attr-defined]
            getattr(state[key], inner[0]).copy_(value)
        else:
            state[key] = placed(assembly, parameter, key, value)
    if isinstance(optimizer, ParameterWise):
        for stateful in list(optimizer.state):
            optimizer.stow(stateful)


def renamed(assembly: Assembly, states: Mapping[str, Any]) -> dict[str, Any]:
    """States by path, converted between torch's AdamW and bitsandbytes' 32-bit one if the saved and the built optimizer
    differ.

    torch's moments have the dtype of the weights and a counter that is a tensor, bitsandbytes' are float32.
    """
    facts = facts_of(assembly.config.training.optimizer)
    renames = dict(_MOMENTS) if facts.package else {theirs: own for own, theirs in _MOMENTS}
    if facts.changes or not any(path.split(SEPARATOR)[1] in renames for path in states):
        return dict(states)
    parameters, found = dict(assembly.model.named_parameters()), dict[str, Any]()
    for path, value in states.items():
        name, key = path.split(SEPARATOR)
        dtype = torch.float32 if facts.package else parameters[name].dtype
        if key == "step":
            found[path] = int(value) if facts.package else torch.tensor(float(value))
        elif key in renames:
            found[f"{name}{SEPARATOR}{renames[key]}"] = value.to(dtype)
        else:
            found[path] = value
    return found


def placed(assembly: Assembly, parameter: nn.Parameter, key: str, value: Any) -> Any:
    """Move a state to the device where the optimizer keeps it."""
    optimizer = assembly.optimizer
    if not isinstance(value, Tensor):
        return value
    if key == AVERAGE and assembly.config.training.ema_device is EmaDevice.HOST:
        return value.cpu()
    if key in ("state1", "state2"):  # bitsandbytes decides by size whether a state is paged
        part = optimizer.parts[parameter] if isinstance(optimizer, ParameterWise) else optimizer
        buffer: Tensor = part.get_state_buffer(parameter, dtype=value.dtype)  # type: ignore[attr-defined]
        return buffer.copy_(value)
    # torch keeps the scalar `step` on the CPU unless the implementation is fused
    if key != "step" or optimizer.defaults.get("fused"):
        return value.to(parameter.device)
    return value

"""Training state: trained weights, random generators and optimizer states, as named tensors; and undoing a step."""

import gc
import json
import random
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from framework.build.assembly import Assembly
from framework.build.model.parts import is_of_adapter
from framework.build.optimizers.low_bit import forget_pages, parts_of
from framework.build.optimizers.parameter_wise import ParameterWise
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.place import Place
from framework.schema.choices import EmaDevice
from framework.schema.optimizers import facts_of


@dataclass
class Attempt:
    """State needed to `undo` a step, recorded before the step begins.

    Before the weights change, undoing means dropping gradients and resetting the generators. An update can be undone
    only if it is the optimizer's first and `keeps_weights`: the weights are copied to the host before it, and the new
    optimizer states are dropped. Later updates change weights and states together, and no copy of both is kept.
    """

    assembly: Assembly
    keeps_weights: bool
    _random: tuple[dict[str, Tensor], dict[str, Any]] = field(init=False)
    _weights: list[Tensor] | None = field(init=False, default=None)
    _is_updating: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._random = random_state()

    def before_update(self) -> None:
        """Copy the weights if needed; called right before they change."""
        if self.keeps_weights and not any(self.assembly.optimizer.state.values()):
            self._weights = copied_to_host(self.assembly.trained, self.assembly.place)
        self._is_updating = True

    @property
    def can_be_undone(self) -> bool:
        return not self._is_updating or self._weights is not None

    def undo(self) -> None:
        """Restore weights, states, gradients, loss scale and generators, and return unused memory to the driver.

        Waits for the device first: pending copies of offloaded activations or weights must not land in memory that the
        next attempt gets.
        """
        assembly = self.assembly
        if assembly.place.kind == "cuda":
            torch.cuda.synchronize(assembly.place.device)
        assembly.drop_gradients()
        assembly.loss_scale.forget_step()
        if self._weights is not None:
            with torch.no_grad():
                for parameter, kept in zip(assembly.trained, self._weights, strict=True):
                    parameter.copy_(kept)
            for state in assembly.optimizer.state.values():
                state.clear()  # in place: the parts of a composed optimizer share these
            forget_pages(assembly.optimizer)
        restore_random_state(*self._random)
        gc.collect()
        if assembly.place.kind == "cuda":
            torch.cuda.empty_cache()


def copied_to_host(tensors: Iterable[Tensor], place: Place) -> list[Tensor]:
    """Copies in host memory. A rehearsal of a card gets expanded views of one element, which take no memory."""
    if place.rehearsed:
        if place.kind != "cuda":
            return [tensor.detach().clone() for tensor in tensors]
        return [torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape) for tensor in tensors]
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def release(error: BaseException | None) -> None:
    """Release the activations that the stack frames of a failed step hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__


def seed_all(seed: int) -> None:
    """Seed all generators as transformers' `set_seed` does, which would import peft."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # seeds every device


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of all generators as tensors and as plain numbers. Does not wait for a device."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    numpy_state = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def dumped() -> str:
    """The states of `random_state` as one text."""
    tensors, numbers = random_state()
    return json.dumps({"tensors": {name: tensor.tolist() for name, tensor in tensors.items()}, "numbers": numbers})


def parsed(text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the text of `dumped`."""
    document = json.loads(text)
    tensors = {name: torch.tensor(values, dtype=torch.uint8) for name, values in document["tensors"].items()}
    return tensors, document["numbers"]


def restore_random_state(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Set all generators to states from `random_state`, which may have been saved as safetensors and JSON."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = numbers["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that training may have changed: all of a model, but with an adapter only the trained ones.

    LoRA's A matrices are included even if frozen: they were initialized, at random or from rows, for this run.
    """
    adapted = hasattr(model, "peft_config")
    parameters = {
        name: parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if not adapted or is_of_adapter(name, parameter)
    }
    kept = set() if adapted else set(model.state_dict())
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in kept}
    return {**parameters, **buffers}


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

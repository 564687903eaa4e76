"""One try at an optimizer step, and the way back from it when memory runs out half way."""

import gc
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.optimizers.low_bit import forget_pages
from framework.build.place import Place
from framework.run.rng import random_state, restore_random_state


@dataclass
class Attempt:
    """What `undo` needs. Make one before the step begins.

    Until the weights change a step is undone by dropping its gradients and setting the generators back. An update is
    undone only where it is the optimizer's first and `keeps_weights`: the weights are copied to the host before it, and
    the states, of which there were none, are dropped. Later updates change weights and states together, and no copy of
    both is kept.
    """

    assembly: Assembly
    keeps_weights: bool
    _random: tuple[dict[str, Tensor], dict[str, Any]] = field(init=False)
    _weights: list[Tensor] | None = field(init=False, default=None)
    _is_updating: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._random = random_state()

    def before_update(self) -> None:
        """To be called right before weights change."""
        if self.keeps_weights and not any(self.assembly.optimizer.state.values()):
            self._weights = copied_to_host(self.assembly.trained, self.assembly.place)
        self._is_updating = True

    @property
    def can_be_undone(self) -> bool:
        return not self._is_updating or self._weights is not None

    def undo(self) -> None:
        """Weights, states, gradients, loss scale and generators as they were; unused memory goes back to the driver.

        Waits for the device first: copies of offloaded activations or weights that are still under way must not land
        in memory that the next try is given.
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
                state.clear()  # in place: optimizers made of parts share these
            forget_pages(assembly.optimizer)
        restore_random_state(*self._random)
        gc.collect()
        if assembly.place.kind == "cuda":
            torch.cuda.empty_cache()


def copied_to_host(tensors: Iterable[Tensor], place: Place) -> list[Tensor]:
    """Copies in host memory. A rehearsal for a card has views of one element in their place, which take none."""
    if place.rehearsed:
        return [_stand_in(tensor) if place.kind == "cuda" else tensor.detach().clone() for tensor in tensors]
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def release(error: BaseException | None) -> None:
    """Let go of what the frames of a failed step hold: its activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__

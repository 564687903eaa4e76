"""Several processes that train one model: who this one is among them, and how they exchange tensors."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

COLLECTIVE = timedelta(minutes=30)
"""How long a rank may be late in the middle of a step."""


class OutOfMemoryElsewhere(Exception):
    """Another rank has run out of memory: this one is to undo what it did since they last met, too."""


@dataclass(frozen=True)
class Ranks:
    """This process among the `world` that train together; alone by default.

    `local_rank` is its number among the `local_world` of its machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    meet: Callable[[], None] = field(default=lambda: None, compare=False)
    """Waits for all ranks, for as long as it takes: not in a collective, which ends them when one is late."""
    alike: int = 1
    """Neighbours that compute the same from the same rows, so that sums count one of them."""
    others: Any = field(default=None, compare=False)
    """torch's process group of the ranks with other rows, of each `alike` neighbours one; None for all ranks."""
    checks_in: bool = False
    """Whether each tells the others, before they do anything together, that it has not run out of memory."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one that logs and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor added up over all ranks' rows, in place; every rank must call this with one of the same shape.

        Raises OutOfMemoryElsewhere, as `check_in` does.
        """
        if self.world > self.alike:
            self.check_in()
            torch.distributed.all_reduce(tensor, group=self.others)
        return tensor

    def count(self, number: int, device: torch.device) -> int:
        """A number added up over all ranks' rows. Waits for the device where there are several."""
        if self.world == self.alike:
            return number
        return int(self.sum(torch.tensor(number, device=device)))

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so on some rank. Waits for the device where there are several."""
        if self.world == 1:
            return here
        self.check_in()
        counted = torch.tensor(int(here), device=device)
        torch.distributed.all_reduce(counted)
        return bool(counted)

    def check_in(self, has_failed: bool = False) -> None:
        """Tell all ranks whether this one has run out of memory since the last time; it takes no memory of the device
        and does not wait for it. Every rank must call this equally often. Nothing happens unless they `checks_in`.

        Raises OutOfMemoryElsewhere on those that have not, when some have.
        """
        if not self.checks_in:
            return
        failed = torch.tensor(int(has_failed), device="cpu")
        torch.distributed.all_reduce(failed)
        if failed and not has_failed:
            raise OutOfMemoryElsewhere


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard where it is split, else all of it."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def shard_number(tensor: Tensor) -> int:
    """Which part of a split tensor this rank holds; 0 of one that is not split."""
    mesh = getattr(tensor, "device_mesh", None)
    return 0 if mesh is None else int(mesh.get_local_rank(mesh.ndim - 1))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is split: every rank must call this."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Replicate  # takes seconds to import, and is there where a tensor is split

    parts: Any = tensor
    dimensions = parts.device_mesh.ndim
    for last in range(dimensions - 1, 0, -1):  # one after the other: torch warns when asked for all at once
        parts = parts.redistribute(placements=[*parts.placements[:last], *[Replicate()] * (dimensions - last)])
    gathered: Tensor = parts.full_tensor()
    return gathered


class Parallel(Protocol):
    """A model that several ranks train together, as one callable."""

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)` within the forward pass of what wraps the model."""
        ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it forward and backward add to this rank's own gradients. Outside, backward leaves on every rank the
        sum of all ranks' gradients (not the mean: the loss is divided by the terms of the whole global batch)."""
        ...

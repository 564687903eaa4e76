"""Ranks: the processes that train one model together, and the collectives between them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

COLLECTIVE = timedelta(minutes=30)
"""Timeout of a collective: how late a rank may be within a step."""


class OutOfMemoryElsewhere(Exception):
    """Another rank has run out of memory, so this one undoes its work since the last check-in too."""


@dataclass(frozen=True)
class Ranks:
    """This process among the `world` that train together; a single one by default.

    `local_rank` is its index among the `local_world` processes of its machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    meet: Callable[[], None] = field(default=lambda: None, compare=False)
    """Barrier without the timeout of a collective."""
    same_rows: int = 1
    """Number of neighboring ranks that compute the same from the same rows, so that sums count one of them."""
    others: Any = field(default=None, compare=False)
    """torch's process group of the ranks with different rows, one of each `same_rows` neighbors; None for all ranks."""
    checks_in: bool = False
    """Whether ranks report to each other before each collective whether they have run out of memory."""

    @property
    def is_main(self) -> bool:
        """Whether this rank logs and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum the tensor in place over all ranks' rows; every rank must call this with the same shape.

        Raises OutOfMemoryElsewhere, as `check_in` does.
        """
        if self.world > self.same_rows:
            self.check_in()
            torch.distributed.all_reduce(tensor, group=self.others)
        return tensor

    def count(self, number: int, device: torch.device) -> int:
        """Sum of a number over all ranks' rows. Synchronizes with the device if there are several."""
        if self.world == self.same_rows:
            return number
        return int(self.sum(torch.tensor(number, device=device)))

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether `here` is true on any rank. Synchronizes with the device if there are several."""
        if self.world == 1:
            return here
        self.check_in()
        counted = torch.tensor(int(here), device=device)
        torch.distributed.all_reduce(counted)
        return bool(counted)

    def check_in(self, has_failed: bool = False) -> None:
        """Report to all ranks whether this one has run out of memory since the last call, without device memory or
        synchronization. Every rank must call this equally often. Does nothing unless `checks_in`.

        Raises OutOfMemoryElsewhere on ranks that have not failed if another has.
        """
        if not self.checks_in:
            return
        failed = torch.tensor(int(has_failed), device="cpu")
        torch.distributed.all_reduce(failed)
        if failed and not has_failed:
            raise OutOfMemoryElsewhere


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor itself if it is not split."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def shard_number(tensor: Tensor) -> int:
    """Index of this rank's shard of a tensor; 0 if it is not split."""
    mesh = getattr(tensor, "device_mesh", None)
    return 0 if mesh is None else int(mesh.get_local_rank(mesh.ndim - 1))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered if it is split: every rank must call this."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Replicate  # takes seconds to import, except where a tensor is split

    parts: Any = tensor
    dimensions = parts.device_mesh.ndim
    for last in range(dimensions - 1, 0, -1):  # one after the other: torch warns when asked for all at once
        parts = parts.redistribute(placements=[*parts.placements[:last], *[Replicate()] * (dimensions - last)])
    gathered: Tensor = parts.full_tensor()
    return gathered


class Parallel(Protocol):
    """Wrapper of a model that several ranks train together."""

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)` within the wrapper's forward pass."""
        ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context in which backward accumulates into the rank's own gradients. Outside of it, backward leaves the sum
        of all ranks' gradients on every rank (not the mean: the loss is divided by the terms of the whole global
        batch)."""
        ...

"""Several processes that train one model: who this one is among them, and the model as they share it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from framework.build.gradient_buckets import GradientBuckets
from framework.build.place import Place
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:
    from framework.build.arrival import Arrival
    from framework.build.tensor_parallel import TensorParallel

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


class Root(nn.Module):
    """What is wrapped: its forward is whatever is asked of the model.

    So every objective, losses in chunks included, and evaluation run inside the wrapper's forward, which calls parts of
    the model that a wrapper around the model itself would not see.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)`."""
        return function(self.model, *arguments)


def parallelise(
    config: TrainingConfig,
    model: nn.Module,
    place: Place,
    ranks: Ranks,
    arrival: "Arrival | None" = None,
    tensor: "TensorParallel | None" = None,
) -> Parallel | None:
    """The model as all ranks train it; None where each trains it as it is. `arrival` brings its weights, of which
    `tensor` leaves this rank's part.

    Call it right before the optimizer is built. Names of parameters stay as they are.
    """
    if config.adds_up_after_backward:
        return GradientBuckets(model, place, ranks)
    root = Root(model)
    if tensor is not None:
        tensor.arrange(model)
    if ranks.world > 1 and config.fsdp.is_sharded:
        from framework.build.shard import shard  # torch's sharding takes seconds to import

        return shard(config, root, model, place, ranks, arrival, tensor)
    if tensor is not None:
        tensor.cut_all(model, root, arrival)
    if ranks.world == ranks.alike or place.rehearsed:  # copies are rehearsed as one
        return None
    ranks.meet()  # from loading, which takes each as long as its disk does
    return _replicated(root, ranks.others)


def _replicated(root: Root, group: Any) -> DistributedDataParallel:
    """torch's DDP: gradients are added up while backward goes on.

    What is frozen, and buffers, which are constants, are neither compared nor sent: every rank has read the same. Every
    trained weight gets a gradient in every backward pass, so unused ones are not searched for (G07). Gradients are
    views of the buckets that are sent: they are there once, not twice.
    """
    torch._dynamo.config.optimize_ddp = False  # it would cut each compiled block at the buckets' edges
    frozen = [name for name, parameter in root.named_parameters() if not parameter.requires_grad]
    frozen += [name for name, _ in root.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, frozen)  # type: ignore[no-untyped-call]
    replicated = DistributedDataParallel(root, gradient_as_bucket_view=True, process_group=group)
    replicated.register_comm_hook(group, _add_up)
    return replicated


def _add_up(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """DDP's own way to reduce a bucket divides by the world first."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    added: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return added

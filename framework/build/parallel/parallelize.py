"""The model as several ranks train it: torch's DDP, shards, or copies that add up gradients after backward."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from framework.build.loading.sharded import ShardLoader
from framework.build.parallel.gradient_buckets import GradientBuckets, reached_by_backward
from framework.build.place import Place
from framework.build.ranks import Parallel, Ranks
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:
    from framework.build.parallel.tensor_parallel import TensorParallel


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


def parallelize(
    config: TrainingConfig,
    model: nn.Module,
    place: Place,
    ranks: Ranks,
    shard_loader: ShardLoader | None = None,
    tensor: "TensorParallel | None" = None,
) -> Parallel | None:
    """The model as all ranks train it; None where each trains it as it is. `shard_loader` brings its weights, of which
    `tensor` leaves this rank's part.

    Call it right before the optimizer is built. Names of parameters stay as they are.
    """
    if config.adds_up_after_backward:
        return GradientBuckets(model, place, ranks)
    root = Root(model)
    if tensor is not None:
        tensor.arrange(model)
    if ranks.world > 1 and config.fsdp.is_sharded:
        from framework.build.parallel.fsdp import shard  # torch's sharding takes seconds to import

        return shard(config, root, model, place, ranks, shard_loader, tensor)
    if tensor is not None:
        tensor.cut_all(model, root, shard_loader)
    if ranks.world == ranks.alike or place.rehearsed:  # copies are rehearsed as one
        return None
    ranks.meet()  # from loading, which takes each as long as its disk does
    return _replicated(root, ranks.others)


def _replicated(root: Root, group: Any) -> DistributedDataParallel:
    """torch's DDP: gradients are added up while backward goes on.

    What is frozen, and buffers, which are constants, are neither compared nor sent: every rank has read the same. Every
    trained weight gets a gradient in every backward pass, so unused ones are not searched for. Gradients are
    views of the buckets that are sent: they are there once, not twice.
    """
    torch._dynamo.config.optimize_ddp = False  # it would cut each compiled block at the buckets' edges
    frozen = [name for name, parameter in root.named_parameters() if not parameter.requires_grad]
    frozen += [name for name, _ in root.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, frozen)  # type: ignore[no-untyped-call]
    replicated = DistributedDataParallel(root, gradient_as_bucket_view=True, process_group=group)
    replicated.register_comm_hook(group, _add_up)
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    _settle_buckets(replicated, trained)
    replicated.reached = reached_by_backward(trained)  # type: ignore[assignment]
    return replicated


def _settle_buckets(replicated: DistributedDataParallel, trained: Sequence[nn.Parameter]) -> None:
    """Have gradients, zeros, where they stay: two passes in which nothing is trained on.

    Before the second one torch makes its buckets anew, in the order in which gradients came. In training that order
    would be better by little, and the old buckets would stay until their last gradient has moved: all gradients are
    there twice for most of a backward pass, and while micro batches are accumulated before there are any.
    """

    def nothing(model: nn.Module) -> Tensor:
        return torch.stack([(parameter * 0).sum(dtype=torch.float32) for parameter in trained]).sum()

    for _ in range(2):
        for parameter in trained:
            parameter.grad = None
        torch.autograd.backward(replicated(nothing))


def _add_up(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """DDP's own way to reduce a bucket divides by the world first."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    added: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return added

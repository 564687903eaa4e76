"""Wrapping of the model for several ranks: DDP, FSDP, or copies that reduce gradients after backward."""

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
    """The wrapped module, whose forward calls any function of the model.

    So objectives, chunked losses included, and evaluation run inside the wrapper's forward although they call parts of
    the model.
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
    """The wrapper of the model; None if none is needed. `shard_loader` loads its weights, which `tensor` cuts to this
    rank's part.

    Call it right before the optimizer is built. Parameter names do not change.
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
    if ranks.world == ranks.same_rows or place.rehearsed:  # DDP is rehearsed as one process
        return None
    ranks.meet()  # loading times differ between ranks
    return _replicated(root, ranks.others)


def _replicated(root: Root, group: Any) -> DistributedDataParallel:
    """torch's DDP, which reduces gradients during backward.

    Frozen parameters and (constant) buffers are neither compared nor broadcast, since every rank has loaded the same.
    Every trained weight gets a gradient in every backward pass, so there is no search for unused ones. Gradients are
    views of the communication buckets, so they exist only once.
    """
    torch._dynamo.config.optimize_ddp = False  # it would split compiled blocks at bucket boundaries
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
    """Create the final buckets by two passes with zero gradients.

    Before the second pass torch rebuilds its buckets in the order of the first gradients. Doing that during training
    would keep the old buckets until their last gradient has moved, so that all gradients exist twice for most of a
    backward pass; the better order gains little.
    """

    def nothing(model: nn.Module) -> Tensor:
        return torch.stack([(parameter * 0).sum(dtype=torch.float32) for parameter in trained]).sum()

    for _ in range(2):
        for parameter in trained:
            parameter.grad = None
        torch.autograd.backward(replicated(nothing))


def _add_up(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook that sums a bucket; DDP's default divides by the world size."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    added: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return added

"""Data parallelism with gradients reduced after backward (`training.on_oom: shrink`).

torch's DDP reduces during backward, where a rank that runs out of memory would leave the others waiting. Here ranks
communicate when each has all of its gradients, or reports that it has failed. Gradients are views of a few flat
tensors, as in DDP: the same memory, no copies. The cost is the lost overlap with backward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from framework.build.place import Place
from framework.build.ranks import Ranks

BUCKET_BYTES = 1 << 28
"""Maximum bytes of a bucket: an all-reduce of that size takes a thousand times its latency."""
_ALIGNMENT = 512
"""Alignment of tensors in torch's allocator, at which kernels use wider loads."""


class GradientBuckets:
    """A `Parallel` with gradients in buckets; a rehearsal has one rank. Call `hold` before training."""

    def __init__(self, model: nn.Module, place: Place, ranks: Ranks) -> None:
        self._model, self._place, self._ranks = model, place, ranks
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = sorted(trained, key=lambda parameter: str(parameter.dtype))
        self._views: list[Tensor] = []
        self.buckets: list[Tensor] = []
        self.reached: set[nn.Parameter] = set()
        if not place.rehearsed:  # a rehearsal does it after its recording has started
            self._begin_alike()
            self.hold()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)`."""
        return function(self._model, *arguments)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """No-op: backward always accumulates into this rank's own gradients."""
        return contextlib.nullcontext()

    def hold(self) -> None:
        """Allocate all gradients, as zeros, for the whole training."""
        for parameters in _grouped(self._trained):
            first = parameters[0]
            size = sum(map(_padded, parameters))
            bucket = torch.zeros(size, dtype=first.dtype, device=first.device)
            start = 0
            for parameter in parameters:
                view = bucket[start : start + parameter.numel()].view(parameter.shape)
                parameter.grad = view
                self._views.append(view)
                start += _padded(parameter)
            self.buckets.append(bucket)
        self.reached = reached_by_backward(self._trained)

    def add_up(self) -> None:
        """All-reduce the gradients. Raises OutOfMemoryElsewhere before any is changed."""
        for parameter, view in zip(self._trained, self._views, strict=True):
            assert parameter.grad is view, "a gradient is not in its bucket"
        self._ranks.check_in()
        if self._ranks.world > 1:
            for bucket in self.buckets:
                torch.distributed.all_reduce(bucket)

    def _begin_alike(self) -> None:
        """Broadcast the first rank's trained weights, as DDP does. Waits for ranks that still load."""
        self._ranks.meet()
        for parameter in self._trained:
            torch.distributed.broadcast(parameter.detach(), 0)


def reached_by_backward(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """A growing set of the parameters that backward has reached since this call; needed because gradients already
    exist."""
    reached: set[nn.Parameter] = set()
    for parameter in parameters:

        def note(one: Tensor, hooks: list[Any]) -> None:
            reached.add(cast(nn.Parameter, one))
            hooks.pop().remove()

        hooks: list[Any] = []
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(note, hooks=hooks)))  # type: ignore[no-untyped-call]
    return reached


def _grouped(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of adjacent parameters of one dtype that share a bucket."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = _padded(parameter) * parameter.element_size()
        if group and (group[0].dtype != parameter.dtype or size + own > BUCKET_BYTES):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += own
    if group:
        yield group


def _padded(parameter: Tensor) -> int:
    """Number of elements including alignment padding."""
    unit = _ALIGNMENT // parameter.element_size()
    return -(-parameter.numel() // unit) * unit

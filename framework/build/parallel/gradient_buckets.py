"""Copies of a model on several ranks that add up their gradients when backward is done (`training.on_oom: shrink`).

torch's DDP does so in the middle of backward, where a rank that runs out of memory leaves the others waiting. Here
ranks meet when each has all of its gradients, or says that it has not. Gradients live in a few flat tensors, as in DDP,
which are sent as they are: the same memory, no copies. What is lost is that the exchange goes on during backward.
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
"""Most bytes of a bucket of several gradients: an exchange of that size takes a thousand times as long as its start."""
_ALIGNMENT = 512
"""Where torch's allocator lets tensors begin; kernels take wider loads there."""


class GradientBuckets:
    """The model as all ranks train it, a `Parallel`; `ranks` of a rehearsal are one. `hold` comes before training."""

    def __init__(self, model: nn.Module, place: Place, ranks: Ranks) -> None:
        self._model, self._place, self._ranks = model, place, ranks
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = sorted(trained, key=lambda parameter: str(parameter.dtype))
        self._views: list[Tensor] = []
        self.buckets: list[Tensor] = []
        self.reached: set[nn.Parameter] = set()
        if not place.rehearsed:  # a rehearsal holds them when its record has begun
            self._begin_alike()
            self.hold()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)`."""
        return function(self._model, *arguments)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward adds to this rank's own gradients, whatever comes next."""
        return contextlib.nullcontext()

    def hold(self) -> None:
        """Take the memory of all gradients, zeros, for as long as the model is trained."""
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
        """Leave on every rank the sum of all ranks' gradients. Raises OutOfMemoryElsewhere before any is changed."""
        for parameter, view in zip(self._trained, self._views, strict=True):
            assert parameter.grad is view, "a gradient is where the exchange does not see it"
        self._ranks.check_in()
        if self._ranks.world > 1:
            for bucket in self.buckets:
                torch.distributed.all_reduce(bucket)

    def _begin_alike(self) -> None:
        """Trained weights as the first rank has them, as DDP does. Waits for ranks that still load."""
        self._ranks.meet()
        for parameter in self._trained:
            torch.distributed.broadcast(parameter.detach(), 0)


def reached_by_backward(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """Those that backward has given something since this was called, in a set that grows; where a gradient is there
    before, it does not tell."""
    reached: set[nn.Parameter] = set()
    for parameter in parameters:

        def note(one: Tensor, hooks: list[Any]) -> None:
            reached.add(cast(nn.Parameter, one))
            hooks.pop().remove()

        hooks: list[Any] = []
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(note, hooks=hooks)))  # type: ignore[no-untyped-call]
    return reached


def _grouped(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype whose gradients make a bucket together."""
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
    """Elements up to where the next gradient may begin."""
    unit = _ALIGNMENT // parameter.element_size()
    return -(-parameter.numel() // unit) * unit

"""Pretend to be rank 0 of several: a process group that exchanges nothing, and CUDA streams that are only names.

Collectives of torch's `fake` backend return at once, so sharding, its gathered blocks and its buffers take the memory
that they take on the first rank of a real run. torch's allocator keeps the free blocks of each stream apart, so the
tracker is told in which stream a tensor is born.

Private names of torch used here (checked by tests/run/rehearsal/test_fake_ranks.py):
`torch.testing._internal.distributed. fake_pg`, `torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from framework.memory.trace import Kind
from framework.run.rehearsal.fake_functions import Patches
from framework.run.rehearsal.tracker import Tracker
from framework.schema.gpu import GPUParams

_COMMUNICATES = ("unshard", "wait_for_unshard", "post_backward")
"""What sharding does around a unit: gather its weights, take them over, reduce its gradients."""


@contextlib.contextmanager
def pretend_ranks(card: GPUParams, world: int, tracker: Tracker, offloads: bool) -> Iterator[None]:
    """Within the block this process is rank 0 of `world`, one card each. All patches are undone at its end.

    `offloads`: parts of weights, gradients and states are in host memory, where the optimizer steps.
    """
    if world == 1:
        yield
        return
    patches, tracker.is_one_of_several = Patches(), True
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        if card.capability is not None:
            _patch_streams(patches, tracker, world)
        # Tell the tracker when sharding is at work, so that it knows what its buffers are for
        for name in _COMMUNICATES:
            patches.set(FSDPParamGroup, name, tracker.communicating()(getattr(FSDPParamGroup, name)))
        if offloads:
            tracker.steps_on_host = True
            _patch_transfers(patches, tracker)
        yield
    finally:
        patches.restore()
        dist.destroy_process_group()


class Stream:
    """A CUDA stream in name: number 0 is the one that computes."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Stream.made += 1
        self.number = Stream.made

    def wait_stream(self, other: "Stream") -> None:
        """Order changes nothing where nothing runs."""

    def wait_event(self, event: "Event | None") -> None:
        """The same."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """All is done."""


class Event:
    """A CUDA event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what torch gives, which changes nothing."""

    def record(self, stream: Stream | None = None) -> None:
        """It has happened."""

    def wait(self, stream: Stream | None = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True


def _patch_streams(patches: Patches, tracker: Tracker, world: int) -> None:
    computing = Stream()
    Stream.made = computing.number = 0
    running = [computing]

    @contextlib.contextmanager
    def enter(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        running.append(stream)
        tracker.stream = stream.number
        try:
            yield
        finally:
            running.pop()
            tracker.stream = running[-1].number

    answers = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *args: running[-1],
        "stream": enter,
        "set_device": lambda *args: None,
        "is_available": lambda: True,
        "device_count": lambda: world,
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch, "Event", Event)
    # which a unit is asked for that was gathered for a backward that it does not take part in
    patches.set(torch.accelerator, "current_stream", answers["current_stream"])


def _patch_transfers(patches: Patches, tracker: Tracker) -> None:
    """A unit's part comes from the host before it is gathered, and its gradients go there when they are reduced."""
    unshard, post_backward = FSDPParamGroup.unshard, FSDPParamGroup.post_backward

    def bring(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.is_unsharded or group._all_gather_result is not None:
            return unshard(group, *args, **kwargs)
        parts = [item.sharded_param.to_local() for item in group.fsdp_params]
        block = tracker.bring_from_host(sum(part.numel() * part.element_size() for part in parts))
        result = unshard(group, *args, **kwargs)
        tracker.trace.bury(block)
        return result

    def send(group: Any, *args: Any) -> None:
        post_backward(group, *args)
        gradients = [item.sharded_param.grad for item in group.fsdp_params if item.sharded_param.grad is not None]
        tracker.send_to_host((gradient.to_local() for gradient in gradients), Kind.GRADIENTS)

    patches.set(FSDPParamGroup, "unshard", bring)
    patches.set(FSDPParamGroup, "post_backward", send)

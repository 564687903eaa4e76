"""Fake process group of several ranks, of which this process is rank 0, and fake CUDA streams.

Collectives of torch's `fake` backend return immediately, so sharding, gathered blocks and buffers take the same memory
as on the first rank of a real run. torch's allocator keeps free blocks per stream, so the tracker needs the stream in
which a tensor is created.

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
"""Methods of sharding around a unit: gather its weights, use them, reduce its gradients."""


@contextlib.contextmanager
def fake_ranks(card: GPUParams, world: int, tracker: Tracker, offloads: bool) -> Iterator[None]:
    """Make this process rank 0 of `world` within the block, one card each. All patches are undone at its end.

    `offloads`: shards of weights, gradients and states are in host memory, where the optimizer steps.
    """
    if world == 1:
        yield
        return
    patches, tracker.is_one_of_several = Patches(), True
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        if card.capability is not None:
            _patch_streams(patches, tracker, world)
        # Tell the tracker when sharding code runs, so that it can attribute its buffers
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
    """A fake CUDA stream: number 0 is the compute stream."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Stream.made += 1
        self.number = Stream.made

    def wait_stream(self, other: "Stream") -> None:
        """Nothing to wait for."""

    def wait_event(self, event: "Event | None") -> None:
        """The same."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """A completed event."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Event:
    """A fake CUDA event, always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept and ignore torch's arguments."""

    def record(self, stream: Stream | None = None) -> None:
        """Nothing to do: it is complete."""

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to do: it is complete."""

    def synchronize(self) -> None:
        """Nothing to do: it is complete."""

    def query(self) -> bool:
        """Nothing to do: it is complete."""
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
    # queried for a unit that was gathered for a backward pass in which it takes no part
    patches.set(torch.accelerator, "current_stream", answers["current_stream"])


def _patch_transfers(patches: Patches, tracker: Tracker) -> None:
    """Record transfers of offloaded units: shards from the host before a gather, gradients to it after a reduction."""
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

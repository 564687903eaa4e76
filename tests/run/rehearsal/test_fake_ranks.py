"""A fake process group leaves nothing behind, and its streams are distinguished."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from framework.memory.trace import Kind
from framework.run.rehearsal.fake_device import fake_device
from framework.run.rehearsal.fake_ranks import fake_ranks
from framework.run.rehearsal.tracker import Tracker
from framework.schema.gpu import GPUParams

CARD = GPUParams(name="h100_80gb", capability="9.0", multiprocessors=132)
PATCHED = ("unshard", "wait_for_unshard", "post_backward")


@pytest.mark.parametrize("offloads", [False, True])
def test_all_is_as_it_was_afterwards(offloads):
    before = [getattr(FSDPParamGroup, name) for name in PATCHED]
    stream, event = torch.cuda.Stream, torch.Event
    with fake_device(CARD), fake_ranks(CARD, 4, Tracker(CARD), offloads):
        assert dist.get_world_size() == 4
        assert dist.get_rank() == 0
        assert torch.cuda.Stream is not stream
        assert all(getattr(FSDPParamGroup, name) is not old for name, old in zip(PATCHED, before, strict=True))
    assert not dist.is_initialized()
    assert (torch.cuda.Stream, torch.Event) == (stream, event)
    assert [getattr(FSDPParamGroup, name) for name in PATCHED] == before


def test_one_rank_needs_no_group():
    with fake_ranks(CARD, 1, Tracker(CARD), False):
        assert not dist.is_initialized()


def test_what_is_born_in_a_stream_is_of_its_pool():
    tracker = Tracker(CARD)
    with fake_device(CARD), fake_ranks(CARD, 2, tracker, False), tracker:
        own = torch.empty(8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()), tracker.communicating():
            gathered = torch.empty(8, device="cuda")
        after = torch.empty(8, device="cuda")
        del own, gathered, after
    trace = tracker.finish()
    assert [stream > 0 for stream in trace.streams] == [False, True, False]
    assert [kind is Kind.COMMUNICATION for kind in trace.kinds] == [False, True, False]

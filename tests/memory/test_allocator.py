"""The replayed allocator against the rules of c10/cuda/CUDACachingAllocator.cpp."""

import pytest

from framework.memory.allocator import (
    MIB,
    CachingAllocator,
    OutOfDeviceMemory,
    SystemAllocator,
    replay,
    round_block,
    segment_size,
)
from framework.memory.trace import Kind, Space, Trace


@pytest.mark.parametrize(("asked", "block"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)])
def test_requests_are_rounded_to_512_bytes(asked: int, block: int) -> None:
    assert round_block(asked) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segments_are_2_mib_20_mib_or_rounded_to_2_mib(block: int, segment: int) -> None:
    assert segment_size(block) == segment


def test_small_blocks_share_a_segment_and_large_ones_have_another() -> None:
    allocator = CachingAllocator()
    allocator.allocate(512)
    allocator.allocate(MIB)
    assert (allocator.allocated, allocator.reserved) == (MIB + 512, 2 * MIB)
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 22 * MIB


def test_a_rest_of_at_most_1_mib_of_a_large_block_is_not_split_off_and_counts_as_allocated() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)
    allocator.free(first)
    allocator.allocate(11 * MIB)
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (12 * MIB, 11 * MIB, 12 * MIB)
    other = CachingAllocator()
    other.free(other.allocate(12 * MIB))
    other.allocate(11 * MIB - 512)
    assert other.allocated == 11 * MIB - 512


def test_the_best_fit_is_the_smallest_block_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(19 * MIB + 512 * 1024).size == 20 * MIB
    assert allocator.reserved == 90 * MIB


def test_freed_neighbours_merge() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(30 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(10 * MIB) for _ in range(3)]
    assert allocator.reserved == 30 * MIB
    for index in (0, 2, 1):
        allocator.free(parts[index])
    assert allocator.allocate(30 * MIB).size == 30 * MIB
    assert allocator.reserved == 30 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB, stream=0))
    allocator.allocate(16 * MIB, stream=1)
    assert allocator.reserved == 32 * MIB


def test_empty_cache_returns_only_segments_that_are_wholly_free() -> None:
    allocator = CachingAllocator()
    kept = allocator.allocate(2 * MIB)
    allocator.free(allocator.allocate(16 * MIB))
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_a_full_device_releases_its_cache_and_tries_again() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(36 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 36 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="36"):
        allocator.allocate(16 * MIB)


def test_an_expandable_segment_grows_at_its_end_and_gives_its_free_end_back() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    assert (first.size, allocator.reserved) == (30 * MIB, 40 * MIB)
    second = allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(55 * MIB).size == 55 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB


def test_the_system_allocator_holds_nothing_back() -> None:
    allocator = SystemAllocator()
    block = allocator.allocate(100)
    assert (allocator.allocated, allocator.reserved) == (128, 128)
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_replay_reports_each_phase_with_what_its_bytes_are_for() -> None:
    trace = Trace()
    trace.enter("load")
    trace.bear(4 * MIB, Kind.WEIGHTS)
    trace.enter("forward")
    activation = trace.bear(30 * MIB, Kind.ACTIVATIONS)
    trace.bear(7 * MIB, Kind.OPTIMIZER, Space.MANAGED)
    trace.bear(5 * MIB, Kind.ACTIVATIONS, Space.PINNED)
    trace.enter("backward")
    trace.bury(activation)
    trace.bear(2 * MIB, Kind.GRADIENTS)
    load, forward, backward = replay(trace, CachingAllocator())
    assert (load.phase, load.allocated, load.reserved) == ("load", 4 * MIB, 20 * MIB)
    assert forward.kinds == {Kind.WEIGHTS: 4 * MIB, Kind.ACTIVATIONS: 30 * MIB}
    assert forward.managed == 3 * 32 * MIB, "managed memory grows in chunks, and takes two more"
    assert forward.host == 8 * MIB, "torch pins powers of two"
    assert backward.allocated == 34 * MIB, "a phase begins with what the one before has left"
    assert backward.reserved == 50 * MIB, "cached segments stay reserved"


def test_replay_empties_the_cache_where_the_trace_says_so() -> None:
    trace = Trace()
    trace.enter("load")
    trace.bury(trace.bear(30 * MIB, Kind.TEMPORARIES))
    trace.enter("forward", empties_cache=True)
    load, forward = replay(trace, CachingAllocator())
    assert (load.reserved, forward.reserved) == (30 * MIB, 0)


def test_of_equal_free_blocks_the_one_of_the_newest_segment_is_taken() -> None:
    """The driver hands out descending addresses, and torch takes the lowest of equals."""
    allocator = CachingAllocator()
    old, new = allocator.allocate(32 * MIB), allocator.allocate(32 * MIB)
    assert new.address < old.address
    allocator.free(old)
    allocator.free(new)
    assert allocator.allocate(32 * MIB).address == new.address


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """It counts as large as it can grow, so a hole that is large enough is filled first."""
    allocator = CachingAllocator(expandable_segments=True)
    hole, between = allocator.allocate(60 * MIB), allocator.allocate(30 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.free(hole)
    assert allocator.allocate(10 * MIB).address == hole.address
    assert between.address > hole.address


def test_blocks_from_the_largest_split_on_stay_whole() -> None:
    allocator = CachingAllocator(max_split_size=64 * MIB)
    large = allocator.allocate(80 * MIB)
    allocator.free(large)
    assert allocator.allocate(30 * MIB).size == 30 * MIB, "a smaller request leaves it alone"
    assert allocator.reserved == 110 * MIB
    assert allocator.allocate(70 * MIB).size == 80 * MIB, "and a large one takes all of it"
    allocator.free(allocator.allocate(200 * MIB))
    allocator.allocate(100 * MIB)
    assert allocator.reserved == (110 + 200 + 100) * MIB, "unless too much of it would be unused"

"""Replay of torch's CUDA caching allocator, which predicts reserved memory by the allocator's own rules.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp (torch 2.11 and 2.13), native backend. The counters are torch's:
`allocated` is the size of the blocks in use, including remainders that were not worth splitting off; `reserved` is the
size of the segments obtained from the driver; `requested` is what the caller asked for.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from framework.memory.addresses import Addresses
from framework.memory.trace import Kind, Mark, Space, Trace

MIB = 1 << 20
# Constants of CUDACachingAllocator.cpp under their original names.
MIN_BLOCK_SIZE = 512
SMALL_SIZE = 1 * MIB
SMALL_BUFFER = 2 * MIB
LARGE_BUFFER = 20 * MIB
MIN_LARGE_ALLOC = 10 * MIB
ROUND_LARGE = 2 * MIB
MANAGED_CHUNK = 32 * MIB
"""Chunk size of managed memory on an H100: 9428, 2357 and 42 MiB of states took 9472, 2432 and 128 MiB (driver 580,
2026-11), which is one or two chunks more than needed; the plan assumes two."""
_EXPANDABLE_RANGE = 1 << 50
"""Address range reserved for an expandable segment, so that it can grow."""


class OutOfDeviceMemory(Exception):
    """The replayed allocator could not serve a request within its capacity, even after releasing cached blocks."""


def round_block(size: int) -> int:
    """Bytes of the block that serves a request of `size` bytes (`round_size`)."""
    return max(MIN_BLOCK_SIZE, -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE)


def segment_size(block: int) -> int:
    """Bytes requested from the driver if no cached block serves `block` bytes (`get_allocation_size`)."""
    if block <= SMALL_SIZE:
        return SMALL_BUFFER
    if block < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-block // ROUND_LARGE) * ROUND_LARGE


def pinned_size(size: int) -> int:
    """Bytes that torch pins for a request: the next power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << max(size - 1, 0).bit_length() if size else 0


def managed_pages(size: int) -> int:
    """Bytes of the card taken by `size` bytes of managed memory while they fit: whole chunks and two more."""
    return -(-size // MANAGED_CHUNK) * MANAGED_CHUNK + 2 * MANAGED_CHUNK if size else 0


class Block:
    """A piece of a segment; `previous` and `next` are its neighbors in the segment."""

    __slots__ = ("address", "free", "next", "previous", "requested", "size")

    def __init__(self, size: int, address: int) -> None:
        self.size = size
        self.address = address
        self.requested = 0
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None


class _Pool:
    """The free blocks of one stream and size class, ordered by size and then by address, as in torch."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.tail: Block | None = None  # last block of the one expandable segment
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._keys, (block.size, block.address))

    def take(self, block: Block) -> None:
        block.free = False
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def best_fit(self, size: int, whole_from: int | None = None) -> Block | None:
        """The smallest free block of at least `size` bytes; among equals the one at the lowest address.

        The end of an expandable segment counts as larger than any other block. Blocks of at least `whole_from` bytes
        are not split: they serve no smaller request, and no large one that would leave much of them unused.
        """
        index = bisect_left(self._keys, (size, -1))
        if index + 1 < len(self._keys) and self._blocks[self._keys[index][1]] is self.tail:
            index += 1
        block = self._blocks[self._keys[index][1]] if index < len(self._keys) else None
        if block is None or whole_from is None:
            return block
        limit = whole_from if size < whole_from else size + LARGE_BUFFER
        return block if block.size < limit else None

    def whole_segments(self) -> list[Block]:
        return [block for block in self._blocks.values() if block.previous is None and block.next is None]


class CachingAllocator:
    """One device's allocator. `capacity` is the limit for all segments in bytes; None is unlimited.

    `expandable_segments` and `max_split_size` (bytes) are torch's settings of these names.
    """

    def __init__(
        self, capacity: int | None = None, expandable_segments: bool = False, max_split_size: int | None = None
    ) -> None:
        self.capacity = capacity
        self.expandable_segments = expandable_segments
        self.max_split_size = max_split_size
        self.allocated = self.reserved = self.requested = 0
        self.retries = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._owner: dict[int, _Pool] = {}
        self._addresses = Addresses()

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Serve a request of `size` bytes. Raises OutOfDeviceMemory if the capacity does not suffice."""
        wanted = round_block(size)
        small = wanted <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best_fit(wanted, self.max_split_size)
        if block is not None:
            pool.take(block)
        elif self.expandable_segments:
            block = self._grow(pool, wanted)
        else:
            segment = segment_size(wanted)
            self._reserve(segment)
            block = Block(segment, self._addresses.take(segment))
        self._split(pool, block, wanted)
        block.requested = size
        self._owner[block.address] = pool
        self.allocated += block.size
        self.requested += size
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool and merge it with free neighbors."""
        pool = self._owner.pop(block.address)
        self.allocated -= block.size
        self.requested -= block.requested
        if (previous := block.previous) is not None and previous.free:
            pool.take(previous)
            block = self._merge(pool, previous, block)
        if (following := block.next) is not None and following.free:
            pool.take(following)
            block = self._merge(pool, block, following)
        pool.put(block)

    def empty_cache(self) -> None:
        """Return every completely free segment to the driver."""
        for pool in self._pools.values():
            if self.expandable_segments:
                self._unmap_tail(pool)
                continue
            for block in pool.whole_segments():
                pool.take(block)
                self.reserved -= block.size

    def _split(self, pool: _Pool, block: Block, wanted: int) -> None:
        """Split the unneeded part off `block` if torch would (`should_split`)."""
        rest = block.size - wanted
        least = MIN_BLOCK_SIZE if self.expandable_segments or pool.small else SMALL_SIZE + 1
        is_whole = self.max_split_size is not None and wanted >= self.max_split_size
        if rest < least or (is_whole and not (self.expandable_segments or pool.small)):
            return
        remainder = Block(rest, block.address + wanted)
        remainder.previous, remainder.next = block, block.next
        if block.next is not None:
            block.next.previous = remainder
        block.next = remainder
        block.size = wanted
        if pool.tail is block:
            pool.tail = remainder
        pool.put(remainder)

    @staticmethod
    def _merge(pool: _Pool, first: Block, second: Block) -> Block:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        if pool.tail is second:
            pool.tail = first
        return first

    def _grow(self, pool: _Pool, wanted: int) -> Block:
        """Map more pages at the end of the pool's expandable segment, including its free tail in the block."""
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        tail = pool.tail
        missing = wanted - (tail.size if tail is not None and tail.free else 0)
        added = max(0, -(-missing // page) * page)
        self._reserve(added)
        if tail is not None and tail.free:
            pool.take(tail)
            tail.size += added
            return tail
        if tail is None:
            block = Block(added, self._addresses.take(_EXPANDABLE_RANGE))
        else:
            block = Block(added, tail.address + tail.size)
            block.previous, tail.next = tail, block
        pool.tail = block
        return block

    def _unmap_tail(self, pool: _Pool) -> None:
        """Unmap the whole pages of the free tail of an expandable segment."""
        tail = pool.tail
        if tail is None or not tail.free:
            return
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        pages = tail.size // page * page
        pool.take(tail)
        self.reserved -= pages
        tail.size -= pages
        if tail.size:
            pool.put(tail)
            return
        pool.tail = tail.previous
        if tail.previous is not None:
            tail.previous.next = None

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.retries += 1
            self.empty_cache()
            if self.reserved + size > self.capacity:
                raise OutOfDeviceMemory(
                    f"{size} more bytes do not fit: {self.reserved} of {self.capacity} are reserved, "
                    f"{self.allocated} of these in use"
                )
        self.reserved += size


class SystemAllocator(CachingAllocator):
    """The C heap of a run on the CPU: freed memory is returned, so nothing is cached."""

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Serve a request of `size` bytes, rounded to the 64 bytes that torch aligns CPU tensors to."""
        block = Block(-(-size // 64) * 64, 0)
        block.requested = size
        self.allocated += block.size
        self.reserved = self.allocated
        self.requested += size
        return block

    def free(self, block: Block) -> None:
        """Return a block to the system."""
        self.allocated -= block.size
        self.reserved = self.allocated
        self.requested -= block.requested

    def empty_cache(self) -> None:
        """There is no cache."""


@dataclass(frozen=True)
class Peak:
    """The moment of a phase with most allocated bytes. `kinds` are the allocated bytes by purpose at that moment."""

    phase: str
    allocated: int
    reserved: int
    requested: int
    managed: int
    host: int
    pinned: int
    """The pinned part of `host`."""
    kinds: Mapping[Kind, int]


@dataclass
class _Phase:
    """Running peaks of the current phase."""

    name: str
    allocated: int = -1
    reserved: int = 0
    requested: int = 0
    managed: int = 0
    host: int = 0
    pinned: int = 0
    kinds: dict[Kind, int] = field(default_factory=dict)

    def finish(self) -> Peak:
        device = self.allocated, self.reserved, self.requested, self.managed
        return Peak(self.name, *device, self.host, self.pinned, self.kinds)


class _Replay:
    """State of a replay between two events."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}
        self.kinds: Counter[Kind] = Counter()
        self.elsewhere: Counter[Space] = Counter()

    def bear(self, trace: Trace, number: int) -> None:
        size, space = trace.sizes[number], trace.spaces[number]
        if space is not Space.DEVICE:
            self.elsewhere[space] += pinned_size(size) if space is Space.PINNED else size
        elif size:
            block = self.allocator.allocate(size, trace.streams[number])
            self.blocks[number] = block
            self.kinds[trace.kinds[number]] += block.size

    def bury(self, trace: Trace, number: int) -> None:
        size, space = trace.sizes[number], trace.spaces[number]
        if space is not Space.DEVICE:
            self.elsewhere[space] -= pinned_size(size) if space is Space.PINNED else size
        elif (block := self.blocks.pop(number, None)) is not None:
            self.kinds[trace.kinds[number]] -= block.size
            self.allocator.free(block)

    def observe(self, phase: _Phase) -> None:
        allocator = self.allocator
        if allocator.reserved > phase.reserved:
            phase.reserved = allocator.reserved
        if allocator.requested > phase.requested:
            phase.requested = allocator.requested
        if self.elsewhere:
            phase.managed = max(phase.managed, managed_pages(self.elsewhere[Space.MANAGED]))
            phase.host = max(phase.host, self.elsewhere[Space.PINNED] + self.elsewhere[Space.HOST])
            phase.pinned = max(phase.pinned, self.elsewhere[Space.PINNED])
        if allocator.allocated > phase.allocated:
            phase.allocated = allocator.allocated
            phase.kinds = dict(self.kinds)


def replay(trace: Trace, allocator: CachingAllocator) -> list[Peak]:
    """Feed `trace` to `allocator`. Returns the peak of every occurrence of a phase, in order.

    A phase that runs twice (two steps, several micro-batches) appears twice. Raises OutOfDeviceMemory if the
    allocator's capacity does not suffice.
    """
    state = _Replay(allocator)
    peaks: list[Peak] = []
    marks = [*trace.marks, Mark(len(trace.events), "")]
    current = _Phase("")
    start = 0
    for mark in marks:
        for event in trace.events[start : mark.event]:
            if event >= 0:
                state.bear(trace, event)
                state.observe(current)
            else:
                state.bury(trace, ~event)
        if start or mark.event or current.name:
            peaks.append(current.finish())
        if mark.empties_cache:
            allocator.empty_cache()
        start = mark.event
        current = _Phase(mark.phase)
        state.observe(current)
    return peaks

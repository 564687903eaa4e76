"""Why memory ran out: the subtraction, and what it leaves as the cause. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import Any

from framework.memory.explain.messages import Message
from framework.memory.explain.shapes import PLACEMENT, SMALLEST_BATCH, Kind, Space
from framework.memory.units import GIB, MIB

LARGE_SHARE, LARGE_BYTES = 0.10, 2 * GIB
"""Reserved but unused memory is the cause when it would have served the request and is a tenth of the card, or 2 GiB:
less of it lies about in any healthy run that fills its card."""
OTHER_SHARE, OTHER_BYTES = 0.05, GIB
"""The same for what other processes hold."""
CONTEXT_BYTES = 2 * GIB
"""More than a process ever holds outside PyTorch's allocator on one card (context, kernels, cuBLAS, NCCL): what is
taken beyond it is another process's, also when none is named."""
SEGMENT = 20 * MIB
"""The allocator asks the driver for up to this much for a smaller request."""
GROWTH_STEPS, GROWTH_WINDOW, GROWTH_BYTES = 8, 20, 16 * MIB
"""The floor grows when it does so over the last steps, at least 8 and at most 20 rises, by so many bytes in all."""
TREND = 0.75
"""Of all pairs of those steps so many more must rise than fall (Kendall's tau). Lengths alone reached it in 1 of 60,000
windows of 15 steps and in none of 60,000 of 21, drawn at random; a rise that came once and stayed has a half."""
LATE_SHARE = 0.7
"""And the later half must grow at this share of the earlier half's rate: caches that fill up come to rest. With 0.7, of
150 leaks of 20 MiB a step beneath 100 MiB of noise 99 % are told within 20 steps."""
STAIRS, STAIR_BYTES, STAIR_GAP, ALIKE = 3, 32 * MIB, 3, 2.0
"""Growth is also so many rises of so many bytes at least, each so many steps after the last at least, that stay; the
largest and the longest apart no more than this times the smallest and the nearest: records among lengths that vary come
ever more seldom."""
SPIKE = 1.2
"""A micro batch is a spike when it has this many times the tokens of the largest before it."""


class Cause(StrEnum):
    """What has to change."""

    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "other_process"
    GROWTH = "growth"
    SPIKE = "spike"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Repair:
    """A size that a run made smaller after memory had run out in `phase` of `step`; step 0 is the trial before all."""

    key: str
    before: int
    after: int
    step: int
    phase: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        moment = f"{self.phase} of step {self.step}" if self.step else f"{self.phase} of the longest rows"
        return f"{self.key} {self.before} -> {self.after} ({moment})"


@dataclass(frozen=True)
class Circumstances:
    """What a run knew when it failed; empty for a bare text.

    `floors` are the bytes allocated at the end of the last steps, oldest first; `batch` and `largest_batch` the
    tokens of the micro batch in hand and of the largest before it. `repairs` are those of the run so far; it has gone
    on after this failure when the last is of this step.
    """

    phase: str | None = None
    step: int | None = None
    floors: tuple[int, ...] = ()
    batch: int | None = None
    largest_batch: int | None = None
    repairs: tuple[Repair, ...] = ()


def find_cause(message: Message, circumstances: Circumstances, is_pinning: bool = False) -> Cause:
    """The cause by arithmetic on what the message states; `unknown` where that decides nothing."""
    if message.kind is not Kind.OUT_OF_MEMORY:
        return Cause.UNKNOWN
    if message.space is Space.HOST or (is_pinning and message.capacity_bytes is None):
        return Cause.HOST
    if message.name in (PLACEMENT, SMALLEST_BATCH):
        return Cause.CAPACITY  # which is what these words say: not all of the model, or not one row, fits
    capacity, request, free = message.capacity_bytes, message.request_bytes, message.free_bytes
    if capacity is None or request is None:
        return _cause_by_circumstances(circumstances) or Cause.UNKNOWN
    if (room := allowed_room(message)) is not None:
        capacity = min(capacity, message.allowed_bytes or capacity)
        free = room if free is None else min(room, free)
    elif free is None and message.outside_bytes is None:
        free = max(capacity - _reserved(message), 0)
    if request > capacity:
        return Cause.CAPACITY
    if free is not None and free >= request + SEGMENT:
        return Cause.UNKNOWN  # there was room: what failed is not told by these figures
    figures = _cause_by_figures(message, capacity, request, free or 0)
    return figures or _cause_by_circumstances(circumstances) or Cause.CAPACITY


def _cause_by_figures(message: Message, capacity: int, request: int, free: int) -> Cause | None:
    """Other processes or fragmentation, whichever holds more, when the request fits without it."""
    unused, others = message.reserved_unallocated_bytes or 0, held_by_others(message) or 0
    candidates = []
    if not is_limited(message) and others + free >= request and others >= min(OTHER_SHARE * capacity, OTHER_BYTES):
        candidates.append((others, Cause.OTHER_PROCESS))
    if unused + free >= request and (unused >= LARGE_SHARE * capacity or unused >= max(LARGE_BYTES, request)):
        candidates.append((unused, Cause.FRAGMENTATION))
    return max(candidates)[1] if candidates else None


def allowed_room(message: Message) -> int | None:
    """Bytes that PyTorch may still take of a memory fraction's limit; None where the text names no limit."""
    return None if message.allowed_bytes is None else max(message.allowed_bytes - _reserved(message), 0)


def is_limited(message: Message) -> bool:
    """Whether a memory fraction refused the request, whatever other processes hold."""
    room = allowed_room(message)
    return room is not None and room < max(message.request_bytes or 0, SEGMENT)


def _cause_by_circumstances(circumstances: Circumstances) -> Cause | None:
    if growth_per_step(circumstances.floors) is not None:
        return Cause.GROWTH
    batch, largest = circumstances.batch, circumstances.largest_batch
    return Cause.SPIKE if batch and largest and batch >= SPIKE * largest else None


def _reserved(message: Message) -> int:
    return (message.allocated_bytes or 0) + (message.reserved_unallocated_bytes or 0)


def held_by_others(message: Message) -> int | None:
    """Bytes of other processes: as named, else what nobody in this process can hold; None where neither is known."""
    if message.other_process_bytes is not None:
        return message.other_process_bytes
    rest = unaccounted_bytes(message)
    if rest is None or is_limited(message):
        return None
    return rest if rest > CONTEXT_BYTES else None


def unaccounted_bytes(message: Message) -> int | None:
    """What is neither free, nor this process's, nor named: the driver's, and processes that were not named."""
    if message.capacity_bytes is None or message.free_bytes is None or message.allocated_bytes is None:
        return None
    if message.process_bytes is None and message.reserved_unallocated_bytes is None:
        return None  # a message that was cut, or the allocator of CUDA: what this process has reserved is not said
    own = message.process_bytes if message.process_bytes is not None else _reserved(message)
    return max(message.capacity_bytes - message.free_bytes - own - (message.other_process_bytes or 0), 0)


def growth_per_step(floors: Sequence[int]) -> int | None:
    """Bytes by which the floor of allocated memory rises a step, of the latest steps; None where it does not grow.

    The median of the slopes of all pairs (Sen 1968), or the slope of regular stairs. A floor that goes up and down with
    lengths does not grow, neither does one that rose once and stayed or that comes to rest.
    """
    trend = _trend(floors)
    return trend if trend is not None else _slope_of_stairs(floors)


def _trend(floors: Sequence[int]) -> int | None:
    recent = floors[-(GROWTH_WINDOW + 1) :]
    if len(recent) <= GROWTH_STEPS:
        return None
    slopes = _slopes(recent)
    rising, typical = sum((slope > 0) - (slope < 0) for slope in slopes), median(slopes)
    is_growing = rising >= TREND * len(slopes) and typical * (len(recent) - 1) >= GROWTH_BYTES
    middle = len(recent) // 2
    early, late = (median(_slopes(half)) for half in (recent[: len(recent) - middle], recent[middle:]))
    return int(typical) if is_growing and late >= LATE_SHARE * early else None


def _slope_of_stairs(floors: Sequence[int]) -> int | None:
    """Bytes a step of a floor whose last rises came at regular distances, each above all that was before."""
    ceilings = list(accumulate(floors, max))
    later = list(accumulate(reversed(floors), min))[::-1]
    steps = range(1, len(floors))
    rises = {at: floors[at] - floors[at - 1] for at in steps if later[at] - ceilings[at - 1] >= STAIR_BYTES}
    last = [*rises][-STAIRS:]
    gaps = [after - before for before, after in pairwise(last)]
    sizes = [rises[at] for at in last]
    if len(last) < STAIRS or min(gaps) < STAIR_GAP or len(floors) - last[-1] > ALIKE * max(gaps):
        return None
    is_regular = max(gaps) <= ALIKE * min(gaps) and max(sizes) <= ALIKE * min(sizes)
    return int(sum(sizes[1:]) / (last[-1] - last[0])) if is_regular else None


def _slopes(values: Sequence[int]) -> list[float]:
    """Rise a step between each two of the values."""
    return [(after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(values), 2)]

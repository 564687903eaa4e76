"""Cause of an out-of-memory failure, found by subtraction. No torch."""

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
"""Reserved but unused memory is the cause if it would have served the request and is a tenth of the card, or 2 GiB: any
healthy run that fills its card has less than that."""
OTHER_SHARE, OTHER_BYTES = 0.05, GIB
"""The same threshold for memory of other processes."""
CONTEXT_BYTES = 2 * GIB
"""Upper limit of a process's memory outside PyTorch's allocator (context, kernels, cuBLAS, NCCL): anything beyond it
belongs to another process, even if none is named."""
SEGMENT = 20 * MIB
"""The allocator may request up to this much from the driver for a smaller request."""
GROWTH_STEPS, GROWTH_WINDOW, GROWTH_BYTES = 8, 20, 16 * MIB
"""Growth of the floor is judged over the last steps (at least 8 and at most 20 rises) and needs this many bytes in
all."""
TREND = 0.75
"""Minimum excess of rising over falling pairs among these steps (Kendall's tau). Random lengths alone reached it in 1
of 60,000 windows of 15 steps and in none of 60,000 of 21; a single permanent rise gives a half."""
LATE_SHARE = 0.7
"""The later half must also grow at least at this share of the earlier half's rate, since caches fill up and stop. With
0.7, 99 % of 150 leaks of 20 MiB per step under 100 MiB of noise are found within 20 steps."""
STAIRS, STAIR_BYTES, STAIR_GAP, ALIKE = 3, 32 * MIB, 3, 2.0
"""Stepwise growth: at least this many permanent rises of at least this many bytes, at least this many steps apart,
whose sizes and distances differ by at most this factor. Record lengths of varying rows become ever rarer instead."""
SPIKE = 1.2
"""A micro-batch with this many times the tokens of the largest before it is a spike."""


class Cause(StrEnum):
    """Cause of an out-of-memory failure."""

    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "other_process"
    GROWTH = "growth"
    SPIKE = "spike"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Repair:
    """A size that a run reduced after running out of memory in `phase` of `step`; step 0 is the trial before the
    first."""

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
    """State of a run when it failed; empty for a bare text.

    `floors` are the bytes allocated at the end of the last steps, oldest first; `batch` and `largest_batch` the tokens
    of the current micro-batch and of the largest before it. `repairs` are those of the run so far; if the last one is
    of this step, the run has continued.
    """

    phase: str | None = None
    step: int | None = None
    floors: tuple[int, ...] = ()
    batch: int | None = None
    largest_batch: int | None = None
    repairs: tuple[Repair, ...] = ()


def find_cause(message: Message, circumstances: Circumstances, is_pinning: bool = False) -> Cause:
    """The cause by arithmetic on the message's figures; `unknown` if these do not decide."""
    if message.kind is not Kind.OUT_OF_MEMORY:
        return Cause.UNKNOWN
    if message.space is Space.HOST or (is_pinning and message.capacity_bytes is None):
        return Cause.HOST
    if message.name in (PLACEMENT, SMALLEST_BATCH):
        return Cause.CAPACITY  # the meaning of these messages: the model, or a single row, does not fit
    capacity, request, free = message.capacity_bytes, message.request_bytes, message.free_bytes
    if capacity is None or request is None:
        return _cause_by_circumstances(circumstances) or Cause.UNKNOWN
    if (room := allowed_left(message)) is not None:
        capacity = min(capacity, message.allowed_bytes or capacity)
        free = room if free is None else min(room, free)
    elif free is None and message.outside_bytes is None:
        free = max(capacity - _reserved(message), 0)
    if request > capacity:
        return Cause.CAPACITY
    if free is not None and free >= request + SEGMENT:
        return Cause.UNKNOWN  # there was enough free: the figures do not explain the failure
    figures = _cause_by_figures(message, capacity, request, free or 0)
    return figures or _cause_by_circumstances(circumstances) or Cause.CAPACITY


def _cause_by_figures(message: Message, capacity: int, request: int, free: int) -> Cause | None:
    """Other processes or fragmentation, whichever holds more, if the request would fit without it."""
    unused, others = message.reserved_unallocated_bytes or 0, held_by_others(message) or 0
    candidates = []
    if not is_limited(message) and others + free >= request and others >= min(OTHER_SHARE * capacity, OTHER_BYTES):
        candidates.append((others, Cause.OTHER_PROCESS))
    if unused + free >= request and (unused >= LARGE_SHARE * capacity or unused >= max(LARGE_BYTES, request)):
        candidates.append((unused, Cause.FRAGMENTATION))
    return max(candidates)[1] if candidates else None


def allowed_left(message: Message) -> int | None:
    """Bytes left of a memory fraction's limit; None if the text names no limit."""
    return None if message.allowed_bytes is None else max(message.allowed_bytes - _reserved(message), 0)


def is_limited(message: Message) -> bool:
    """Whether a memory fraction refused the request, independent of other processes."""
    room = allowed_left(message)
    return room is not None and room < max(message.request_bytes or 0, SEGMENT)


def _cause_by_circumstances(circumstances: Circumstances) -> Cause | None:
    if growth_per_step(circumstances.floors) is not None:
        return Cause.GROWTH
    batch, largest = circumstances.batch, circumstances.largest_batch
    return Cause.SPIKE if batch and largest and batch >= SPIKE * largest else None


def _reserved(message: Message) -> int:
    return (message.allocated_bytes or 0) + (message.reserved_unallocated_bytes or 0)


def held_by_others(message: Message) -> int | None:
    """Bytes of other processes, as named or inferred from what this process cannot hold; None if neither is known."""
    if message.other_process_bytes is not None:
        return message.other_process_bytes
    rest = unaccounted_bytes(message)
    if rest is None or is_limited(message):
        return None
    return rest if rest > CONTEXT_BYTES else None


def unaccounted_bytes(message: Message) -> int | None:
    """Bytes that are neither free, nor this process's, nor named: of the driver and unnamed processes."""
    if message.capacity_bytes is None or message.free_bytes is None or message.allocated_bytes is None:
        return None
    if message.process_bytes is None and message.reserved_unallocated_bytes is None:
        return None  # a truncated message, or CUDA's own allocator, without this process's reserved bytes
    own = message.process_bytes if message.process_bytes is not None else _reserved(message)
    return max(message.capacity_bytes - message.free_bytes - own - (message.other_process_bytes or 0), 0)


def growth_per_step(floors: Sequence[int]) -> int | None:
    """Growth of the allocated floor per step over the latest steps, in bytes; None if it does not grow.

    The median slope of all pairs (Sen 1968), or the slope of regular steps. A floor that varies with lengths, rose once
    or stops growing does not count.
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
    """Growth per step of a floor whose last rises came at regular distances, each a new maximum."""
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
    """Slope between each two of the values."""
    return [(after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(values), 2)]

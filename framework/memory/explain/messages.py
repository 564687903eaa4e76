"""Parser of failure messages: kind of failure, and every figure with the printed precision. No torch."""

import re
from dataclasses import dataclass, replace
from decimal import Decimal

from framework.memory.explain.lines import Compact, Line, by_writer, clean
from framework.memory.explain.shapes import (
    ABSURD,
    ASYNC,
    BARE,
    LOOSE,
    MPS,
    SHAPES,
    SIZE,
    Kind,
    Shape,
    Space,
    is_telling,
)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "E": 2**60}
_LONGEST = 6000
"""Maximum characters of an allocator's message without white space; it names every process on the card."""
_MOST_BYTES = 2**53
"""Larger values are negative counters: WSL's `17179869184.00 GiB`."""
_SHOWN = 3


@dataclass(frozen=True)
class Message:
    """The first report of a failure in a text. Bytes are None if the text does not give them.

    `process_bytes` is all memory of this process on the card; `outside_bytes` its memory outside PyTorch's allocator if
    given separately (MPS); `allowed_bytes` a limit set by a memory fraction.
    `others` are (process id, bytes) of the other processes named. `line` counts from 0.
    """

    kind: Kind
    space: Space
    name: str
    excerpt: str
    line: int
    request_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    process_bytes: int | None = None
    outside_bytes: int | None = None
    allowed_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    writers: tuple[str, ...] = ()
    """Prefixes of the ranks that report such a failure, this message's first; empty without prefixes."""
    variable: str = ""
    """The allocator's environment variable as named by the message; it differs between PyTorch's versions and
    builds."""

    @property
    def other_process_bytes(self) -> int | None:
        """Total of the other processes that are named."""
        return sum(size for _, size in self.others) if self.others else None


def read_message(text: str) -> tuple[Message, tuple[Line, ...]] | None:
    """The failure that a text reports, and the lines of the process that reported it; None if it reports no known one.

    The first message counts; later ones, also from other ranks, are echoes. Out of memory has priority over a value
    that is not finite, which often does not end a run (in a float16 scaler's first steps, or in a metric). A hang
    counts only without either, since a rank that died leaves the others waiting. A message with an impossible size is
    itself an echo.
    """
    lines = clean(text, is_telling)
    groups = [Compact(group) for group in by_writer(lines)]
    found = [hit for group in groups for shape in SHAPES if (hit := _find(shape, group))]
    found = found or [hit for group in groups for shape in (BARE, LOOSE) if (hit := _find(shape, group))]
    if not found:
        return None
    found.sort(key=_rank)
    first = found[0]
    same_kind = (hit.text.lines[hit.index].writer for hit in found if hit.shape.kind is first.shape.kind)
    writers = tuple(dict.fromkeys(mark.strip("[]():| ") for mark in same_kind if mark))
    return replace(_read(first), writers=writers), tuple(first.text.lines)


@dataclass(frozen=True)
class _Hit:
    shape: Shape
    text: Compact
    index: int
    """Index of the line among the writer's lines."""
    start: int
    """Position in the compact text; for a pattern of one line the start of that line."""
    match: re.Match[str]

    @property
    def line(self) -> int:
        return self.text.lines[self.index].number


def _rank(hit: _Hit) -> tuple[int, int, int, int]:
    is_echo = hit.shape.kind is Kind.HANG or hit.shape.pattern is ABSURD
    weight = 2 if is_echo else int(hit.shape.kind is Kind.NAN)
    order = [*SHAPES, BARE, LOOSE].index(hit.shape)
    return weight, hit.line, hit.start, order


def _find(shape: Shape, text: Compact) -> _Hit | None:
    if not shape.is_line:
        match = shape.pattern.search(text.text)
        return _Hit(shape, text, text.line_at(match.start()), match.start(), match) if match else None
    for index, line in enumerate(text.lines):
        if match := shape.pattern.search(line.text):
            return _Hit(shape, text, index, 0, match)
    return None


def _read(hit: _Hit) -> Message:
    lines = hit.text.lines[hit.index : hit.index + _SHOWN]
    excerpt = " ".join(line.text.strip() for line in lines if line.text.strip())
    request = _size(*hit.match.groups()[:2]) if hit.match.re.groups == 2 and hit.match.group(1) else None
    plain = Message(hit.shape.kind, hit.shape.space, hit.shape.name, excerpt, hit.line, request)
    if hit.shape.is_line:
        return plain
    rest = hit.text.text[hit.start : hit.start + _LONGEST]
    if hit.shape.pattern is MPS:
        return replace(
            plain,
            request_bytes=_first(rf"Triedtoallocate{SIZE}on", rest),
            capacity_bytes=_first(rf"maxallowed:{SIZE}", rest),
            allocated_bytes=plain.request_bytes,
            outside_bytes=_first(rf"otherallocations:{SIZE}", rest),
        )
    own = hit.match.end() - hit.start
    if hit.shape.pattern is ASYNC:
        return replace(
            plain,
            request_bytes=_first(rf"Requested:{SIZE}", rest),
            capacity_bytes=_first(rf"Devicelimit:{SIZE}", rest),
            free_bytes=_first(rf"Free\(accordingtoCUDA\):{SIZE}", rest),
            allocated_bytes=_first(rf"Currentlyallocated:{SIZE}", rest),
            allowed_bytes=_first(rf"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):{SIZE}", rest),
        )
    if "triedtoallocate" in rest[:own].lower() and hit.shape.space is Space.CARD:
        return _read_torch(plain, rest[:own] + rest[own:].partition("Triedtoallocate")[0])
    if hit.shape.name == "kernel":
        return replace(plain, request_bytes=None, allocated_bytes=_first(r"anon-rss:(\d{1,20})(kB)", rest))
    if hit.shape.name == "nccl":
        return replace(plain, request_bytes=_first(r"FailedtoCUDA[cm]alloc(?:async)?(\d{1,20})(bytes)", rest[:400]))
    return plain


def _read_torch(plain: Message, rest: str) -> Message:
    """Read messages of PyTorch's allocators for CUDA, HIP, XPU and NPU, in older and newer wordings.

    In older ones `reserved in total` includes the allocated bytes; in the oldest ones `cached` does not.
    """
    allocated = _first(rf"{SIZE}alreadyallocated|Oftheallocatedmemory{SIZE}isallocatedbyPyTorch", rest)
    unallocated = _first(rf"{SIZE}isreservedbyPyTorchbutunallocated|{SIZE}cached", rest)
    reserved = _first(rf"{SIZE}reservedintotal", rest)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(reserved - allocated, 0)
    process = _first(rf"thisprocesshas{SIZE}memoryinuse", rest)
    named = [
        (int(number), size)
        for number, *parts in re.findall(rf"Process(\d{{1,10}})has{SIZE}memoryinuse", rest)
        if (size := _size(*parts)) is not None
    ]
    if process is None and not re.search(r"thisprocesshas", rest):
        process, named = (
            _own_process(named, (allocated or 0) + (unallocated or 0)) if allocated is not None else (None, [])
        )
    return replace(
        plain,
        capacity_bytes=_first(rf"totalcapaci?tyof{SIZE}|{SIZE}totalcapacity", rest),
        free_bytes=_first(rf"ofwhich{SIZE}isfree|{SIZE}free[;)]", rest),
        allocated_bytes=allocated,
        reserved_unallocated_bytes=unallocated,
        process_bytes=process,
        allowed_bytes=_first(rf"{SIZE}allowed", rest),
        others=tuple(named),
        variable=next(iter(re.findall(r"PYTORCH_(?:\w+_)?ALLOC_CONF", rest)), ""),
    )


def _own_process(named: list[tuple[int, int]], reserved: int) -> tuple[int | None, list[tuple[int, int]]]:
    """Find this process among those named. In a container PyTorch does not know its own id: it is the smallest process
    that holds all bytes reserved by PyTorch."""
    able = [pair for pair in named if pair[1] >= reserved > 0]
    own = min(able, key=lambda pair: pair[1]) if able else None
    return (own[1] if own else None), [pair for pair in named if pair is not own]


def _first(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = [part for part in match.groups() if part is not None][:2]
    return _size(number, unit)


def _size(number: str, unit: str) -> int | None:
    """Bytes of a printed size, rounded to the nearest; None for a negative counter."""
    factor = _UNITS[unit[:1].upper() if unit != "bytes" else ""]
    found = int((Decimal(number) * factor).to_integral_value())
    return found if found < _MOST_BYTES else None


def weight(message: Message) -> int:
    """Priority of a failure among several, lowest first: 0 out of memory, 1 a value that is not finite, 2 a consequence
    of another rank's failure."""
    if message.kind is Kind.HANG or message.name == "absurd size":
        return 2
    return int(message.kind is Kind.NAN)


def is_out_of_memory(text: str) -> bool:
    """Whether an exception's text reports out of memory."""
    found = read_message(text)
    return found is not None and found[0].kind is Kind.OUT_OF_MEMORY

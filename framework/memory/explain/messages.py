"""What a text says of a failure: its kind, and every figure in it, exact to the byte that was printed. No torch."""

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
"""Characters, without white space, that one message of an allocator may have: it names every process on the card."""
_MOST_BYTES = 2**53
"""More is a counter below zero: WSL's `17179869184.00 GiB`."""
_SHOWN = 3


@dataclass(frozen=True)
class Message:
    """The first report of a failure in a text. Bytes are None where the text does not give them.

    `process_bytes` is what this process holds on the card, PyTorch or not; `outside_bytes` what this process holds
    outside PyTorch's allocator, where that is said by itself (MPS); `allowed_bytes` a limit set by a memory fraction.
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
    """Marks of the ranks that report such a failure, this message's first; none where the lines have no marks."""
    variable: str = ""
    """The environment variable of the allocator that the message names: PyTorch's versions and builds differ in it."""

    @property
    def other_process_bytes(self) -> int | None:
        """What the other processes that are named hold in all."""
        return sum(size for _, size in self.others) if self.others else None


def read_message(text: str) -> tuple[Message, tuple[Line, ...]] | None:
    """The failure that a text reports, and the lines of the process that reported it; None when it reports none known.

    The first message counts: what comes after it, also from other ranks, are echoes. Memory that ran out ends a run,
    which a figure that is not finite often does not (of a float16 scaler's first steps, or of a metric): that counts
    only where no memory ran out. A hang counts only where there is neither, since a rank that has died leaves the
    others waiting; a size beyond all measure is an echo itself.
    """
    lines = clean(text, is_telling)
    groups = [Compact(group) for group in by_writer(lines)]
    found = [hit for group in groups for shape in SHAPES if (hit := _find(shape, group))]
    found = found or [hit for group in groups for shape in (BARE, LOOSE) if (hit := _find(shape, group))]
    if not found:
        return None
    found.sort(key=_rank)
    first = found[0]
    alike = (hit.text.lines[hit.index].writer for hit in found if hit.shape.kind is first.shape.kind)
    writers = tuple(dict.fromkeys(mark.strip("[]():| ") for mark in alike if mark))
    return replace(_read(first), writers=writers), tuple(first.text.lines)


@dataclass(frozen=True)
class _Hit:
    shape: Shape
    text: Compact
    index: int
    """Of the line, within the writer's lines."""
    start: int
    """In compact text; where only a line was looked at, the start of that line."""
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
    """PyTorch's allocators for CUDA, HIP, XPU and NPU, in their older and newer words.

    What older ones call `reserved in total` holds the allocated bytes; what the oldest call `cached` does not.
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
    """In a container PyTorch does not know its own number among those the driver names: it is the smallest that holds
    all that PyTorch has reserved."""
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
    """Bytes of a printed size, rounded to the nearest; None for a counter that went below zero."""
    factor = _UNITS[unit[:1].upper() if unit != "bytes" else ""]
    found = int((Decimal(number) * factor).to_integral_value())
    return found if found < _MOST_BYTES else None


def weight(message: Message) -> int:
    """How little a failure tells where there is another: 0 where memory ran out, 1 for a value that is not finite, 2
    for what follows from another rank's failure."""
    if message.kind is Kind.HANG or message.name == "absurd size":
        return 2
    return int(message.kind is Kind.NAN)


def is_out_of_memory(text: str) -> bool:
    """Whether an exception's text says that memory has run out."""
    found = read_message(text)
    return found is not None and found[0].kind is Kind.OUT_OF_MEMORY

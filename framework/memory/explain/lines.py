"""A log as it was meant: without colours, ranks, times and boxes in front of its lines, one process at a time."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_RANK = re.compile(
    r"\[(?:rank|default)\d+\]:"  # torch.distributed and torchrun --tee
    r"|\[\d+,\d+\]<std(?:out|err)>:?"  # mpirun --tag-output
    r"|\([\w.-]+ (?:rank=\d+, )?pid=\d+[^)]*\)"  # Ray
    r"|\d+: (?=\S|  )"  # srun --label, also of a stack's indented lines
    r"|[\w.-]+\s+\| "  # docker compose
)
"""Who wrote a line. Lines that begin alike belong together; the others of a log with several writers do not."""
_TIME = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: std(?:out|err) [FP](?= |$))?"  # CRI
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?:"  # journald, syslog
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\[\d+\] "  # numbered lines
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\]"  # glog
)
_LEVEL = re.compile(r"(?:- )?\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\]?:?(?: -)?(?=\s)")
_FRAME = re.compile(r"[│║┃▏|>#]+(?=\s|$)")
_BAR = re.compile(
    r"(?:^\s*[^|:]{0,60}: +)?\d{1,3}%\|[^|]*\|\s*[\d.,kKMG]+/[\d.,kKMG?]+\s*\[(?:(?!\bnan\b|\binf\b)[^\]])*\]"  # tqdm
    r"|(?:^\s*[^|:]{0,60}: +)?\b\d+(?:it| examples| steps) \[\d[^\]]*(?:s/it|/s)\]"  # tqdm that knows no end
    r"|^[^━]*[━╸╺]{4}.*$"  # rich
)
"""Progress that another thread or library wrote into the middle of a message; kept where it shows a loss of nan."""
_ENDING = re.compile(r"[\s│║┃]+")
BEFORE, AFTER = 400, 60
"""Lines in front of a message that may hold its stack, and after it that may hold the rest of it."""
_PARTS = (_RANK, _TIME, _LEVEL, _FRAME)


@dataclass(frozen=True)
class Line:
    """One line: its number in the log from 0, the writer's mark (empty where there is none) and the text proper."""

    number: int
    writer: str
    text: str


def clean(text: str, is_telling: Callable[[str], bool]) -> list[Line]:
    """The lines of a log within reach of a telling one; a log may have a million others.

    A carriage return, as progress bars write it, ends a line too.
    """
    raw = re.split(r"\r\n|\n|\r", _COLOUR.sub("", text))
    wanted: set[int] = set()
    for number, line in enumerate(raw):
        if is_telling(line):
            wanted.update(range(max(number - BEFORE, 0), min(number + AFTER, len(raw))))
    return [_clean(number, line) for number in sorted(wanted) for line in _of_record(raw[number], is_telling)]


def _of_record(line: str, is_telling: Callable[[str], bool]) -> list[str]:
    """The lines within a record of JSON, as containers and torchrun's error files write them; else the line itself."""
    if not line.lstrip().startswith("{"):
        return [line]
    try:
        texts = list(_texts(json.loads(line)))
    except (ValueError, RecursionError):
        return [line]
    is_elsewhere = is_telling(line) and not any(map(is_telling, texts))  # such as in the number of a metric
    return [line] if is_elsewhere or not texts else [part for text in texts for part in text.splitlines()]


def _texts(value: Any) -> Iterator[str]:
    """The texts of a record; single words, such as a stream's name or a time, are none."""
    if isinstance(value, str) and len(value.split(" ")) + value.count("\n") > 1:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _clean(number: int, line: str) -> Line:
    writer, text = "", _BAR.sub("", _COLOUR.sub("", line))
    left = text.lstrip()
    while found := next((match for part in _PARTS if (match := part.match(left))), None):
        if found.re is _RANK:
            writer = writer or found.group().strip()
        text = left[found.end() :]
        left = text.lstrip()
    ending = _ENDING.match(text[::-1])  # a search for it from the front takes the square of the spaces within
    return Line(number, writer, text[: len(text) - ending.end()] if ending else text)


def by_writer(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each writer, in order."""
    for writer in dict.fromkeys(line.writer for line in lines):
        yield [line for line in lines if line.writer == writer]


class Compact:
    """Lines without any white space and end to end: a message reads the same however a terminal has wrapped it."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self._starts: list[int] = []
        parts, length = [], 0
        for line in lines:
            self._starts.append(length)
            parts.append("".join(line.text.split()))
            length += len(parts[-1])
        self.text = "".join(parts)

    def line_at(self, position: int) -> int:
        """Index in `lines` of the line that holds a position of `text`."""
        return bisect_right(self._starts, position) - 1

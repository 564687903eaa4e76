"""Printing of results, problems and warnings. Results go to stdout or requested files, everything else to stderr."""

import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import Problem, RequestError
from framework.paths import kind_of, path_like
from framework.schema.plural import counted
from framework.terminal import on_one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
"""Version of the JSON documents, increased if a key is removed or changes its meaning."""
_GAP = "  "
_PADDED = 48
"""Most characters that a cell is padded to where there is no terminal."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one document of a command with --json."""
    print_text(json.dumps({"schema_version": SCHEMA_VERSION, **document}, ensure_ascii=False, default=str))


def print_problems(problems: Sequence[Problem]) -> None:
    """Print all problems, each with key, place, expected value and nearest valid value."""
    console = _stderr()
    for problem in problems:
        head, _, rest = str(problem).partition("\n")
        console.print(f"[bold red]error[/] {_escaped(head)}")
        if rest:
            console.print(_escaped(rest))
    if len(problems) > 1:
        console.print(counted(len(problems), "problem"))


def print_warnings(warnings: Iterable[object]) -> None:
    """Print one line for each warning."""
    for warning in warnings:
        _stderr().print(f"[yellow]warning[/] {_escaped(one_line(warning))}")


def one_line(warning: object) -> str:
    """A warning with its place and the expected value in brackets after it."""
    message, *rest = (line.strip() for line in str(warning).splitlines())
    return f"{message} ({'; '.join(rest)})" if rest else message


def say(message: str) -> None:
    """Print one line about progress on stderr."""
    _stderr().print(_escaped(message))


def complain(message: str, with_traceback: bool) -> None:
    """Print one error line on stderr, optionally after the traceback of the current exception."""
    if with_traceback:
        traceback.print_exc()
    _stderr().print(f"[bold red]error[/] {_escaped(message)}")


def stdout() -> "Console":
    """The console for results. Only on a terminal it has colors and wraps lines between words."""
    from framework.console import TerminalConsole

    return TerminalConsole(soft_wrap=True, highlight=False, emoji=False)


def print_text(text: str, end: str = "\n") -> None:
    """Print a result unchanged, except for control characters."""
    print(visible(text), end=end)


def print_prose(text: str) -> None:
    """Print a result that consists of sentences."""
    stdout().print(_escaped(text))


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns that other programs can read; on a narrower terminal they are wrapped, and elsewhere a
    longer cell moves the rest of its line."""
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    is_folded = 0 < room < sum(widths) + len(_GAP) * (len(widths) - 1)
    if not room:
        for row in rows:
            print(_GAP.join(cell.ljust(min(width, _PADDED)) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    if is_folded and widths[0] > room // 2:  # the first column stays unbroken, in a separate line
        for first, *others in rows:
            print("\n".join([*([first] if first else []), *_aligned(["", *others], [0, *_shares(widths[1:], room)])]))
        return
    if is_folded:
        widths = [widths[0], *_shares(widths[1:], room - widths[0])]
    for row in rows:
        print("\n".join(_aligned(row, widths)))


def _shares(widths: Sequence[int], room: int) -> list[int]:
    """Column widths that fit after the first column: the widest are reduced to a common width."""
    room -= len(_GAP) * len(widths)
    shares = dict.fromkeys(range(len(widths)), 0)
    for others, column in enumerate(sorted(shares, key=lambda column: widths[column])):
        shares[column] = min(widths[column], max(room // (len(widths) - others), 1))
        room -= shares[column]
    return list(shares.values())


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The lines of a row, as many as its longest cell needs."""
    folded = [
        textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = zip_longest(*folded, fillvalue="")
    return [_GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _stderr() -> "Console":
    from framework.console import TerminalConsole

    return TerminalConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


NOT_WRITTEN = RequestError.exit_code


def check_writable(file: Path | None, option: str) -> None:
    """Raise RequestError if a requested file cannot be written, before anything else takes time."""
    if file is None:
        return
    folder, kind = file.absolute().parent, "a folder" if file.is_dir() else kind_of(file)
    reason = None if folder.is_dir() else f"there is no folder {folder}"
    if kind not in (None, "a character device"):  # those take bytes at once: a terminal, /dev/null
        reason = f"it is {kind}"
    if reason:
        raise RequestError([_unwritten(file, option, reason)])


def written(file: Path | None, option: str, text: Callable[[], str]) -> list[Problem]:
    """Write the text to the file, if one was requested. Returns the problems that prevented it, for `exit_code`."""
    if file is None:
        return []
    content = text()
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK  # it may be a FIFO by now
        descriptor = os.open(file, flags, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as opened:  # names of files may be no text
            opened.write(content)
    except OSError as error:
        return [_unwritten(file, option, error.strerror or str(error))]
    return []


def as_document(problems: Sequence[Problem]) -> dict[str, object]:
    """Part of the one document of --json about files that could not be written."""
    return {"errors": [problem.to_json() for problem in problems]} if problems else {}


def exit_code(problems: Sequence[Problem], code: int) -> int:
    """Report files that could not be written, each on a line of stderr. Returns their exit code, else `code`."""
    for problem in problems:
        nearest = f"; did you mean {problem.nearest}" if problem.nearest else ""
        complain(f"{problem.key}: {problem.message}{nearest}", with_traceback=False)
    return NOT_WRITTEN if problems else code


def _unwritten(file: Path, option: str, reason: str) -> Problem:
    folder = None if file.absolute().parent.is_dir() else path_like(file.parent, Path.is_dir)
    nearest = str(Path(folder) / file.name) if folder else None
    expected = "a file in a folder that exists and can be written to"
    return Problem(option, f"{file} cannot be written: {reason}", None, expected, nearest)

"""How results, problems and warnings look. Results go to stdout, everything else to stderr."""

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from framework.errors import Problem
from framework.schema.plural import counted
from framework.terminal import on_one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
"""Of the JSON documents; raised when a key of one is removed or changes its meaning."""


def print_json(document: Mapping[str, Any]) -> None:
    """The one document of a verb under --json."""
    print_text(json.dumps({"schema_version": SCHEMA_VERSION, **document}, ensure_ascii=False, default=str))


def print_problems(problems: Sequence[Problem]) -> None:
    """All problems, each with key, place, what was expected and the nearest right thing."""
    console = _stderr()
    for problem in problems:
        head, _, rest = str(problem).partition("\n")
        console.print(f"[bold red]error[/] {_escaped(head)}")
        if rest:
            console.print(_escaped(rest))
    if len(problems) > 1:
        console.print(counted(len(problems), "problem"))


def print_warnings(warnings: Iterable[object]) -> None:
    """One line for each warning."""
    for warning in warnings:
        text = " ".join(line.strip() for line in str(warning).splitlines())
        _stderr().print(f"[yellow]warning[/] {_escaped(text)}")


def say(message: str) -> None:
    """One line on stderr about what goes on."""
    _stderr().print(_escaped(message))


def complain(message: str, with_traceback: bool) -> None:
    """One line on stderr, after the traceback of the exception being handled when that is asked for."""
    if with_traceback:
        traceback.print_exc()
    _stderr().print(f"[bold red]error[/] {_escaped(message)}")


def stdout() -> "Console":
    """The console that results go to. It is in colour on a terminal alone, and lines keep their length in a pipe."""
    from framework.console import TerminalConsole

    return TerminalConsole(soft_wrap=True, highlight=False, emoji=False)


def print_text(text: str, end: str = "\n") -> None:
    """A result, as it is but for characters that a terminal would obey."""
    print(visible(text), end=end)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Plain aligned columns, so that other programs can read them."""
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _stderr() -> "Console":
    from framework.console import TerminalConsole

    return TerminalConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)

"""A plan as lines for a terminal: readable at 80 columns, with colors if the console has them."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from framework.memory.ledger import Plan
from framework.reports import plan_text

if TYPE_CHECKING:
    from framework.run.planning.measurements import Measured

LEAST_WIDTH = 72
"""Minimum width; narrower terminals wrap lines themselves."""
FIGURE = 10
"""Columns of a figure in a table."""


@dataclass(frozen=True)
class Strokes:
    """Characters for bars."""

    used: str
    held: str
    limit: str


BLOCKS = Strokes("█", "░", "│")
ASCII = Strokes("#", ".", "|")
"""For an output that cannot encode the others."""


def strokes_for(encoding: str) -> Strokes:
    """Bar characters supported by an encoding."""
    try:
        "█░│".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def plan_lines(
    title: str, plan: Plan, measured: "Measured | None" = None, width: int = 80, strokes: Strokes = BLOCKS
) -> list[Text]:
    """Lines of a plan, at most `width` columns (or LEAST_WIDTH) long."""
    width = max(width, LEAST_WIDTH)
    return [
        *_verdict(title, plan, width),
        *_terms(plan, width, strokes),
        *_phases(plan, width, strokes),
        *_facts(plan, width),
        *_shards(plan),
        *(_measured(plan, measured, width) if measured is not None else ()),
        *_items("Assumptions", plan.assumptions, width),
        *_items("Warnings", plan.warnings, width, "yellow"),
    ]


def table(rows: Sequence[Sequence[str]]) -> Iterator[Text]:
    """Aligned columns, the first one left-aligned and the others right-aligned; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(size) for cell, size in others)]
        yield Text("  ".join(cells).rstrip(), "bold" if number == 0 else "")


def _verdict(title: str, plan: Plan, width: int) -> Iterator[Text]:
    found = plan_text.verdict(plan)
    style = "bold" if not found.is_compared else "bold green" if found.fits else "bold red"
    yield from wrapped(f"{title} {found.headline}", width, style)
    for detail in found.details:
        yield from wrapped(detail, width)


def _terms(plan: Plan, width: int, strokes: Strokes) -> Iterator[Text]:
    rows, total = plan_text.term_rows(plan.peak.terms), plan.peak.device_bytes
    names = max(len(name) for name, _ in rows)
    unit, each = plan_text.unit_of(total)
    room = width - names - FIGURE - 10
    yield Text()
    yield Text(f"{'At the peak':{names}}{unit:>{FIGURE}}   share", "bold")
    for name, count in rows:
        bar = strokes.used * round(room * count / rows[0][1])
        yield _line(f"{name:{names}}{count / each:{FIGURE},.2f}{count / total:8.1%}  ", (bar, "cyan"))
    yield Text(f"{'together':{names}}{total / each:{FIGURE},.2f}")


def _phases(plan: Plan, width: int, strokes: Strokes) -> Iterator[Text]:
    usable, upper = plan.device.usable_bytes, plan.peak.device_bytes_upper
    rows = [(plan_text.phase_name(phase.name), phase.allocated_bytes, phase.device_bytes) for phase in plan.phases]
    if usable is not None:
        rows.append(("upper end", plan.peak.allocated_bytes, upper))
    names = max(len(name) for name, *_ in rows)
    unit, each = plan_text.unit_of(plan.peak.device_bytes)
    scale = max(usable or 0, *(held for *_, held in rows))
    room = width - names - FIGURE - 3
    legend = f"{strokes.used} in use  {strokes.held} cached, driver"
    limit = f"  {strokes.limit} {plan_text.size(usable)} usable" if usable is not None else ""
    yield Text()
    yield Text(f"{'Phase':{names}}{unit:>{FIGURE}}  {legend}{limit}", "bold")
    for name, used, held in rows:
        bar = _bar(used / scale, held / scale, usable / scale if usable is not None else None, room, strokes)
        yield _line(f"{name:{names}}{held / each:{FIGURE},.2f}  ", *bar)


def _shards(plan: Plan) -> Iterator[Text]:
    if rows := plan_text.shard_rows(plan):
        yield Text()
        yield from table((plan_text.SHARDS_HEADING, *rows))


def _bar(used: float, held: float, limit: float | None, room: int, strokes: Strokes) -> Iterator[tuple[str, str]]:
    """One bar of `room` columns, with the limit at its end; lengths are shares of it."""
    full, whole = (max(round(room * share), 1) for share in (used, held))
    line = round(room * limit) if limit is not None else None
    for column in range(room + 1):
        if column == line:
            yield strokes.limit, "bold"
        elif column < whole:
            over = line is not None and column > line
            yield strokes.used if column < full else strokes.held, "red" if over else "cyan"
        else:
            yield " ", ""


def _facts(plan: Plan, width: int) -> Iterator[Text]:
    rows = plan_text.facts(plan)
    names = max(len(name) for name, _ in rows) + 2
    yield Text()
    for name, sentence in rows:
        first, *others = textwrap.wrap(sentence, width - names)
        yield _line((f"{name:{names}}", "bold"), first)
        yield from (Text(" " * names + line) for line in others)


def _measured(plan: Plan, measured: "Measured", width: int) -> Iterator[Text]:
    rows = plan_text.measured_rows(plan, measured)
    heading = ("Forward to optimizer step", "predicted", "measured", "error")
    yield Text()
    yield from table([heading, *((row.name, row.predicted, row.measured, plan_text.error(row.error)) for row in rows)])
    yield from wrapped(f"measured on {measured.device_name}, planned for {plan.device.name}", width)


def _items(heading: str, items: Iterable[str], width: int, style: str = "") -> Iterator[Text]:
    for number, item in enumerate(items):
        if number == 0:
            yield Text()
            yield Text(heading, "bold")
        first, *others = textwrap.wrap(item, width - 2)
        yield from (Text(line, style) for line in (f"- {first}", *(f"  {line}" for line in others)))


def wrapped(sentence: str, width: int, style: str = "") -> Iterator[Text]:
    """Wrap a sentence to lines of at most `width` columns."""
    return (Text(line, style) for line in textwrap.wrap(sentence, width))


def _line(*parts: str | tuple[str, str]) -> Text:
    text = Text.assemble(*parts)
    text.rstrip()
    return text

"""The plans of several values of one key: a table for the terminal, and a page with a plot."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from framework.escaping import escape
from framework.reports import plan_text
from framework.reports.drawing import LEFT, RIGHT, ROW, TOP, WIDTH, svg, text
from framework.reports.page import document, scrolling
from framework.reports.page import table as html_table
from framework.reports.terminal import LEAST_WIDTH, table, wrapped
from framework.run.planning.what_if import Row

_BAR = 16
"""Height of a bar, in units of the view box."""


def what_if_lines(title: str, key: str, rows: Sequence[Row], width: int = 80) -> Iterator[Text]:
    """A line for each value: peak, its upper end, verdict, speed; then why a value is refused."""
    width = max(width, LEAST_WIDTH)
    yield from wrapped(f"{title}, by {key}", width, "bold")
    yield Text()
    yield from table([_heading(key), *map(_cells, rows)])
    for row in rows:
        if row.refusal:
            yield from wrapped(f"{row.value}: {row.refusal}", width, "red")


def what_if_page(title: str, key: str, rows: Sequence[Row]) -> str:
    """The same as a page, with a bar for each value next to what its card can hold."""
    refused = [f'<p class="warnings">{escape(row.value)}: {escape(row.refusal)}</p>' for row in rows if row.refusal]
    parts = [
        f"<h1>{escape(title)}, by {escape(key)}</h1>",
        *([scrolling(_plot(rows))] if any(row.plan for row in rows) else []),
        html_table(_heading(key), map(_cells, rows)),
        *refused,
    ]
    return document(f"{title}, by {key}", parts)


def _heading(key: str) -> tuple[str, ...]:
    return (key.rpartition(".")[2], "peak", "up to", "usable", "verdict", "tokens/s a device")


def _cells(row: Row) -> tuple[str, ...]:
    if row.plan is None:
        return (row.value, "-", "-", "-", "refused", "-")
    peak, usable, speed = row.plan.peak, row.plan.device.usable_bytes, row.tokens_per_second
    return (
        row.value,
        plan_text.size(peak.device_bytes),
        plan_text.size(peak.device_bytes_upper),
        plan_text.size(usable) if usable is not None else "-",
        "-" if usable is None else "fits" if row.fits else "does not fit",
        f"{speed:,.0f}" if speed is not None else "-",
    )


def _plot(rows: Sequence[Row]) -> str:
    """A bar of the expected peak, a line to its upper end, and a mark where the card of that row ends."""
    planned = [(row.value, row.plan) for row in rows if row.plan is not None]
    ends = [(plan.peak.device_bytes_upper, plan.device.usable_bytes or 0) for _, plan in planned]
    scale = (WIDTH - LEFT - RIGHT) / max(1, *(max(pair) for pair in ends))
    parts = []
    for number, (value, plan) in enumerate(planned):
        middle = TOP + ROW * number + ROW / 2
        top, end, upper = middle - _BAR / 2, plan.peak.device_bytes * scale, plan.peak.device_bytes_upper * scale
        parts.append(text(LEFT - 10, middle, value, "end"))
        parts.append(f'<rect class="weights" x="{LEFT}" y="{top:.1f}" width="{end:.1f}" height="{_BAR}"/>')
        parts.append(f'<path d="M{LEFT + end:.1f} {middle:.1f}H{LEFT + upper:.1f}"/>')
        if (usable := plan.device.usable_bytes) is not None:
            parts.append(f'<path class="limit" d="M{LEFT + usable * scale:.1f} {top - 4:.1f}v{_BAR + 8}"/>')
        parts.append(text(WIDTH, middle, plan_text.size(plan.peak.device_bytes), "end"))
    return svg(WIDTH, TOP + ROW * len(planned) + 6, "Bytes on the device by value", parts)

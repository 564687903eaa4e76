"""Comparison of plans: two with the effect of each change by itself, or one for each value of a key."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from framework.escaping import escape
from framework.memory.ledger import Plan
from framework.reports import plan_text
from framework.reports.page import LEFT, RIGHT, ROW, TOP, WIDTH, document, scrolling, svg, text
from framework.reports.page import table as html_table
from framework.reports.terminal import LEAST_WIDTH, table, wrapped
from framework.run.planning.what_if import Cause, Comparison, Row


def comparison_lines(comparison: Comparison, width: int = 80) -> list[Text]:
    """Lines with the terms of both peaks, their difference, and its causes."""
    a, b = comparison.a, comparison.b
    heading = ("At the peak", "a", "b", "b - a")
    return [
        Text(),
        *table([heading, *_rows(a, b)]),
        *wrapped(f"a {plan_text.verdict(a).headline}", width),
        *wrapped(f"b {plan_text.verdict(b).headline}", width),
        *_causes(comparison, width),
    ]


def _rows(a: Plan, b: Plan) -> Iterator[tuple[str, str, str, str]]:
    theirs = b.peak.terms.to_json()
    for key, ours in a.peak.terms.to_json().items():
        if ours or theirs[key]:
            yield _row(plan_text.TERMS[key], ours, theirs[key])
    yield _row("together", a.peak.device_bytes, b.peak.device_bytes)
    yield _row("upper end", a.peak.device_bytes_upper, b.peak.device_bytes_upper)
    yield "in", plan_text.phase_name(a.peak.phase), plan_text.phase_name(b.peak.phase), ""


def _row(name: str, ours: int, theirs: int) -> tuple[str, str, str, str]:
    return name, plan_text.size(ours), plan_text.size(theirs), plan_text.signed_size(theirs - ours)


def _causes(comparison: Comparison, width: int) -> Iterator[Text]:
    if not comparison.causes:
        return
    rows = [(", ".join(cause.keys), *_effect(comparison.a, cause)) for cause in by_effect(comparison)]
    yield Text()
    yield from table([("a with only these keys from b", "peak", "upper end", "then in"), *rows])
    for cause in comparison.causes:
        if cause.refusal:
            yield from wrapped(f"{', '.join(cause.keys)}: not possible by themselves, {cause.refusal}", width)
    if comparison.others:
        yield from wrapped(f"not planned separately: {', '.join(comparison.others)}", width)
    more = remainder(comparison)
    if more:
        yield from wrapped(f"{plan_text.signed_size(more)} more comes from keys acting together", width)


def _effect(a: Plan, cause: Cause) -> tuple[str, str, str]:
    if cause.plan is None:
        return "not possible", "", ""
    there, here = cause.plan.peak, a.peak
    expected, upper = there.device_bytes - here.device_bytes, there.device_bytes_upper - here.device_bytes_upper
    return plan_text.signed_size(expected), plan_text.signed_size(upper), plan_text.phase_name(there.phase)


def by_effect(comparison: Comparison) -> list[Cause]:
    """The causes by decreasing effect on the peak, impossible ones last."""
    start = comparison.a.peak.device_bytes
    return sorted(comparison.causes, key=lambda c: -abs(c.plan.peak.device_bytes - start) if c.plan else 1)


def remainder(comparison: Comparison) -> int:
    """Bytes of the peak by which all changes together differ from the sum of the single effects."""
    start = comparison.a.peak.device_bytes
    alone = sum(cause.plan.peak.device_bytes - start for cause in comparison.causes if cause.plan is not None)
    return comparison.b.peak.device_bytes - start - alone


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """`memory` of `diff --memory --json`. The `device_bytes` of a cause are added to a's peak."""
    a, b = comparison.a, comparison.b
    ours, theirs = a.peak.terms.to_json(), b.peak.terms.to_json()
    return {
        "terms": {key: {"a": ours[key], "b": theirs[key], "difference": theirs[key] - ours[key]} for key in ours},
        "device_bytes": {
            "a": a.peak.device_bytes,
            "b": b.peak.device_bytes,
            "difference": b.peak.device_bytes - a.peak.device_bytes,
        },
        "device_bytes_upper": {
            "a": a.peak.device_bytes_upper,
            "b": b.peak.device_bytes_upper,
            "difference": b.peak.device_bytes_upper - a.peak.device_bytes_upper,
        },
        "causes": [
            {
                "keys": list(cause.keys),
                "device_bytes": cause.plan.peak.device_bytes - a.peak.device_bytes if cause.plan else None,
                "device_bytes_upper": (
                    cause.plan.peak.device_bytes_upper - a.peak.device_bytes_upper if cause.plan else None
                ),
                "refusal": cause.refusal,
            }
            for cause in by_effect(comparison)
        ],
        "not_planned_alone": list(comparison.others),
        "a": a.to_json(),
        "b": b.to_json(),
    }


_BAR = 16
"""Height of a bar, in units of the view box."""


def what_if_lines(title: str, key: str, rows: Sequence[Row], width: int = 80) -> Iterator[Text]:
    """A line for each value with peak, upper end, verdict and speed; then the reasons for refused values."""
    width = max(width, LEAST_WIDTH)
    yield from wrapped(f"{title}, by {key}", width, "bold")
    yield Text()
    yield from table([_heading(key), *map(_cells, rows)])
    for row in rows:
        if row.refusal:
            yield from wrapped(f"{row.value}: {row.refusal}", width, "red")


def what_if_page(title: str, key: str, rows: Sequence[Row]) -> str:
    """The same as a page, with a bar for each value and a mark for its card's usable memory."""
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

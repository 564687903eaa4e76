"""Two plans side by side, and what each change does by itself."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from framework.memory.ledger import Plan
from framework.reports import plan_text
from framework.reports.terminal import table, wrapped
from framework.run.planning.memory_diff import Cause, Comparison


def comparison_lines(comparison: Comparison, width: int = 80) -> list[Text]:
    """The terms of both peaks, their difference, and its causes."""
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
    yield from table([("a with these keys from b, alone", "peak", "upper end", "then in"), *rows])
    for cause in comparison.causes:
        if cause.refusal:
            yield from wrapped(f"{', '.join(cause.keys)}: not possible alone, {cause.refusal}", width)
    if comparison.others:
        yield from wrapped(f"not planned alone: {', '.join(comparison.others)}", width)
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
    """The causes, those that change the peak most first and the impossible ones last."""
    start = comparison.a.peak.device_bytes
    return sorted(comparison.causes, key=lambda c: -abs(c.plan.peak.device_bytes - start) if c.plan else 1)


def remainder(comparison: Comparison) -> int:
    """What the changes do together beyond the sum of what each does alone, in bytes of the peak."""
    start = comparison.a.peak.device_bytes
    alone = sum(cause.plan.peak.device_bytes - start for cause in comparison.causes if cause.plan is not None)
    return comparison.b.peak.device_bytes - start - alone


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """`memory` of `diff --memory --json`. The `device_bytes` of a cause is what it adds to a's peak."""
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

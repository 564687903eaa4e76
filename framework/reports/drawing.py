"""Bars as inline SVG. Colours are classes of the page's style sheet, so that one drawing serves light and dark."""

import math
from collections.abc import Iterable, Iterator

from framework.escaping import escape
from framework.memory.ledger import Plan, Terms
from framework.reports import plan_text

WIDTH, LEFT, RIGHT = 860, 120, 90
"""Of the drawing, its names and its figures, in units of the view box."""
ROW, BAR, TOP = 30, 20, 26
FONT = 13


def phases_svg(plan: Plan) -> str:
    """One stacked bar for each phase, and a line where the card ends."""
    usable = plan.device.usable_bytes
    upper = plan.peak.device_bytes_upper if usable is not None else 0
    longest = max(usable or 0, upper, *(phase.device_bytes for phase in plan.phases))
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    for number, phase in enumerate(plan.phases):
        middle = TOP + ROW * number + ROW / 2
        parts.append(text(LEFT - 10, middle, plan_text.phase_name(phase.name), "end"))
        parts += _segments(phase.terms, middle - BAR / 2, scale)
        end = LEFT + phase.device_bytes * scale
        if upper and phase.name == plan.peak.phase:
            parts += _whisker(end, LEFT + upper * scale, middle, plan_text.size(upper))
        parts.append(text(WIDTH, middle, plan_text.size(phase.device_bytes), "end"))
    bottom = TOP + ROW * len(plan.phases)
    if usable is not None:
        parts += _limit(LEFT + usable * scale, bottom, f"{plan_text.size(usable)} usable")
    return svg(WIDTH, bottom + 6, "Bytes on the device by phase", parts)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A drawing with its name, for who cannot see it too."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" font-size="{FONT}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def ticks(start: float, end: float, about: int = 5) -> list[float]:
    """Round numbers from `start` to `end`, about so many."""
    rough = (end - start) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _segments(terms: Terms, top: float, scale: float) -> Iterator[str]:
    """The terms of one phase, side by side in the order of the ledger."""
    left = float(LEFT)
    for key, count in terms.to_json().items():
        if count:
            width = count * scale
            title = f"{plan_text.TERMS[key]}: {plan_text.size(count)}"
            yield (
                f'<rect class="{key}" x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{BAR}">'
                f"<title>{escape(title)}</title></rect>"
            )
            left += width


def _whisker(start: float, end: float, middle: float, label: str) -> Iterator[str]:
    """How far up the plan's uncertainty reaches."""
    yield (
        f'<path class="mark" d="M{start:.1f} {middle:.1f}H{end:.1f}M{end:.1f} {middle - 6:.1f}v12">'
        f"<title>up to {escape(label)}</title></path>"
    )


def _limit(at: float, bottom: float, label: str) -> Iterator[str]:
    """The end of the card. Its label is set to the side that has room."""
    line = f'd="M{at:.1f} {TOP - 4}V{bottom}"'
    yield f'<path class="halo" {line}/><path class="limit" {line}/>'
    is_left = at < WIDTH / 2
    yield text(at + (4 if is_left else -4), TOP - 12, label, "start" if is_left else "end")


def text(x: float, middle: float, label: str, anchor: str) -> str:
    """A label whose middle is at that height."""
    return f'<text x="{x:.1f}" y="{middle + FONT / 3:.1f}" text-anchor="{anchor}">{escape(label)}</text>'

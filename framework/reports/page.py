"""A plan as one self-contained HTML page, without scripts, fonts or images."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from framework.escaping import escape
from framework.memory.ledger import Plan, Terms
from framework.reports import plan_text

if TYPE_CHECKING:
    from framework.run.planning.measurements import Measured

COLOURS = {
    "weights": "#4269d0",
    "gradients": "#efb118",
    "optimizer": "#ff725c",
    "activations": "#3ca951",
    "logits_and_loss": "#6cc5b0",
    "autocast_copies": "#ff8ab7",
    "temporaries": "#a463f2",
    "communication": "#97bbf5",
    "fragmentation": "#b9bec6",
    "overhead": "#7d838c",
    "unattributed": "#9c6b4e",
}
"""Term -> color, distinguishable on white and black (the Observable 10 palette, and grays for terms without
tensors)."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2024; --soft: #60646c; --rule: #dfe3e6;
  --good: #18794e; --bad: #c62a2f; --warn: #946800 }
@media (prefers-color-scheme: dark) { :root { --ground: #111418; --ink: #eceef0; --soft: #9ba1a6; --rule: #2f353b;
  --good: #4cc38a; --bad: #ff8589; --warn: #f1a10d } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto;
  max-width: 880px; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.fits { color: var(--good) } .over { color: var(--bad) } .soft { color: var(--soft); margin: 0 }
.scroll { overflow-x: auto } svg { display: block; min-width: 640px; width: 100% } text { fill: currentColor }
rect { stroke: var(--ground) } path { fill: none; stroke: currentColor; stroke-width: 1.5 }
.halo { stroke: var(--ground); stroke-width: 4 } .legend { color: var(--soft); font-size: .85rem; margin: .5rem 0 0 }
.legend span { display: inline-block; margin-right: 1rem } .legend .swatch { margin-right: .4em }
table { border-collapse: collapse; width: 100% } th, td { border-top: 1px solid var(--rule); padding: .3rem .5rem;
  text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal }
thead th { border-top: 0; color: var(--soft); font-weight: 500 } tfoot td { font-weight: 600 }
circle.planned { fill: var(--ink) } circle.sketched { fill: var(--ground); stroke: currentColor }
circle.fits { fill: none; stroke: var(--good); stroke-width: 2.5 } .limit { stroke: var(--bad) }
.swatch { border-radius: 2px; display: inline-block; height: .8em; margin-right: .5em; width: .8em }
dl { display: grid; gap: .3rem 1.5rem; grid-template-columns: max-content 1fr; margin: 0 } dt { color: var(--soft) }
details { margin: .5rem 0 } summary { color: var(--soft); cursor: pointer; font-size: .85rem }
h1, p, dd, li, td:first-child { overflow-wrap: anywhere } dd { margin: 0 } .warnings { color: var(--warn) }
"""


def plan_page(title: str, plan: Plan, measured: "Measured | None" = None) -> str:
    """Page with everything that the terminal shows, and a stacked bar of terms for every phase."""
    found = plan_text.verdict(plan)
    judged = ("fits" if found.fits else "over") if found.is_compared else ""
    occurring = [key for key in COLOURS if any(phase.terms.to_json()[key] for phase in plan.phases)]
    terms = "".join(f'<span><i class="swatch {key}"></i>{escape(plan_text.TERMS[key])}</span>' for key in occurring)
    mark = "<span>⊣ uncertainty of the peak</span>" if plan.device.usable_bytes is not None else ""
    legend = f'<p class="legend">{terms}{mark}</p>'
    parts = [
        f'<h1 class="{judged}">{escape(title)} {escape(found.headline)}</h1>',
        *(f'<p class="soft">{escape(detail)}</p>' for detail in found.details),
        "<h2>Phase by phase</h2>",
        f'<div class="scroll">{phases_svg(plan)}</div>',
        legend,
        _phases(plan),
        "<h2>At the peak</h2>",
        _terms(plan),
        "<h2>The run</h2>",
        definitions(plan_text.facts(plan)),
        *((table(plan_text.SHARDS_HEADING, rows),) if (rows := plan_text.shard_rows(plan)) else ()),
        *(_measured(plan, measured) if measured is not None else ()),
        *items("Assumptions", plan.assumptions),
        *items("Warnings", plan.warnings, "warnings"),
    ]
    return document(f"Plan of {title}", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A complete page with styles around the given parts."""
    colours = "\n".join(f".{term} {{ background: {colour}; fill: {colour} }}" for term, colour in COLOURS.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{colours}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _phases(plan: Plan) -> str:
    """The figures of the drawing as a table, for small screens."""
    rows = [(plan_text.phase_name(phase.name), plan_text.size(phase.device_bytes)) for phase in plan.phases]
    figures = table(("Phase", "bytes on the device"), rows)
    return f"<details><summary>Figures: bytes on the device by phase</summary>{figures}</details>"


def _terms(plan: Plan) -> str:
    total = plan.peak.device_bytes
    named = sorted(plan.peak.terms.to_json().items(), key=lambda item: -item[1])
    rows = [
        f'<tr><td><span class="swatch {key}"></span>{escape(plan_text.TERMS[key])}</td>'
        f"<td>{plan_text.size(count)}</td><td>{count / total:.1%}</td></tr>"
        for key, count in named
        if count
    ]
    return scrolling(
        "<table><thead><tr><th>Term</th><th>Bytes</th><th>Share</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody>"
        f"<tfoot><tr><td>together</td><td>{plan_text.size(total)}</td><td></td></tr></tfoot></table>"
    )


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """A list of names and sentences."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(sentence)}</dd>" for name, sentence in facts)
    return f"<dl>{''.join(rows)}</dl>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls on narrow pages. The first cell of each row is its header."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heading)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def scrolling(wide: str) -> str:
    """A table or drawing that scrolls by itself on narrow pages."""
    return f'<div class="scroll" tabindex="0">{wide}</div>'


def _measured(plan: Plan, measured: "Measured") -> Sequence[str]:
    rows = "".join(
        f"<tr><td>{row.name}</td><td>{row.predicted}</td><td>{row.measured}</td><td>{plan_text.error(row.error)}</td></tr>"
        for row in plan_text.measured_rows(plan, measured)
    )
    heading = "<tr><th>Forward to optimizer step</th><th>predicted</th><th>measured</th><th>error</th></tr>"
    return (
        f"<h2>Measured on {escape(measured.device_name)}</h2>",
        scrolling(f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>"),
    )


def items(heading: str, sentences: Sequence[str], style: str = "") -> Sequence[str]:
    """A list under a heading; empty without sentences."""
    if not sentences:
        return ()
    rows = "".join(f"<li>{escape(item)}</li>" for item in sentences)
    return (f"<h2>{heading}</h2>", f'<ul class="{style}">{rows}</ul>')


WIDTH, LEFT, RIGHT = 860, 120, 90
"""Sizes of the drawing, its names and its figures, in units of the view box."""
ROW, BAR, TOP = 30, 20, 26
FONT = 13


def phases_svg(plan: Plan) -> str:
    """One stacked bar for each phase, and a line at the card's limit."""
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
            most = LEFT + upper * scale  # upper end of the plan's uncertainty
            path = f"M{end:.1f} {middle:.1f}H{most:.1f}M{most:.1f} {middle - 6:.1f}v12"
            label = f"<title>up to {escape(plan_text.size(upper))}</title>"
            parts.append(f'<path class="mark" d="{path}">{label}</path>')
        parts.append(text(WIDTH, middle, plan_text.size(phase.device_bytes), "end"))
    bottom = TOP + ROW * len(plan.phases)
    if usable is not None:
        at = LEFT + usable * scale
        line = f'd="M{at:.1f} {TOP - 4}V{bottom}"'
        parts.append(f'<path class="halo" {line}/><path class="limit" {line}/>')
        aside, anchor = (4, "start") if at < WIDTH / 2 else (-4, "end")  # the side with enough space
        parts.append(text(at + aside, TOP - 12, f"{plan_text.size(usable)} usable", anchor))
    return svg(WIDTH, bottom + 6, "Bytes on the device by phase", parts)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A drawing with an accessible name."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" font-size="{FONT}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def ticks(start: float, end: float, about: int = 5) -> list[float]:
    """Round numbers from `start` to `end`, about `about` of them."""
    rough = (end - start) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _segments(terms: Terms, top: float, scale: float) -> Iterator[str]:
    """The terms of one phase, in the order of the ledger."""
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


def text(x: float, middle: float, label: str, anchor: str) -> str:
    """A label, vertically centered at `middle`."""
    return f'<text x="{x:.1f}" y="{middle + FONT / 3:.1f}" text-anchor="{anchor}">{escape(label)}</text>'

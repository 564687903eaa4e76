"""Result of a search, as lines for a terminal and as an HTML page with a plot of speed against memory."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from framework.escaping import escape
from framework.memory.levers import format_value
from framework.memory.search.found import Change, Found, Point
from framework.reports import plan_text
from framework.reports.page import WIDTH, document, items, scrolling, svg, text, ticks
from framework.reports.terminal import BLOCKS, LEAST_WIDTH, Strokes, table, wrapped

LEAST_SETTINGS = 24
"""Minimum characters for the settings of a point in a line."""


def fit_lines(title: str, found: Found, width: int = 80, strokes: Strokes = BLOCKS) -> list[Text]:
    """Lines with the proposal, the gain of each change, the speed-memory frontier, and overrides to paste."""
    width = max(width, LEAST_WIDTH)
    return [
        *_head(title, found, width),
        *_changes(found, width),
        *_frontier(found, width, strokes),
        *_tail(found, width),
    ]


def _head(title: str, found: Found, width: int) -> Iterator[Text]:
    verdict = plan_text.verdict(found.plan)
    style = "bold green" if found.fits else "bold red"
    lead = title if found.fits else f"{title}: nothing that was searched fits; the closest"
    yield from wrapped(f"{lead} {verdict.headline}", width, style)
    if found.plan.step is not None:
        before = found.before.step if found.before is not None else None
        was = f" (as written {before.tokens_per_second:,.0f})" if before is not None else ""
        yield from wrapped(f"{found.plan.step.tokens_per_second:,.0f} tokens/s{was}, predicted", width)
    if found.before is not None and not found.before.fits:
        yield from wrapped(f"as written it {plan_text.verdict(found.before).headline}", width)
    if found.shortage is not None:
        yield from wrapped(f"this machine has too little memory for it: {found.shortage}", width)
    if not found.plan.fits:
        larger = found.smallest_card
        yield from wrapped(f"it fits on {larger}" if larger else "it fits on none of the larger shipped cards", width)
    for remark in found.remarks:
        yield from wrapped(remark, width)


def _changes(found: Found, width: int) -> Iterator[Text]:
    if not found.changes:
        yield from wrapped("Nothing has to change: this is the fastest that was found.", width)
        return
    heading = ("Change", "memory", "a step", "training")
    yield Text()
    rows = [
        (f"{each.key} {format_value(each.old)} -> {format_value(each.new)}", *_cells(each)) for each in found.changes
    ]
    yield from table([heading, *rows])
    yield Text()
    for change in found.changes:
        yield from wrapped(f"{change.key.rpartition('.')[2]}: {change.why}", width)


def _cells(change: Change) -> tuple[str, str, str]:
    """Effect of a change on memory, step time and training result."""
    memory = "-" if change.saves_bytes is None else plan_text.signed_size(-change.saves_bytes)
    costs = "-" if change.costs_seconds is None else f"{change.costs_seconds:+.3f} s"
    return memory, costs, "same" if change.exact else "CHANGED"


def _frontier(found: Found, width: int, strokes: Strokes) -> Iterator[Text]:
    if len(found.frontier) < 2:
        return
    fastest = max(point.tokens_per_second or 0.0 for point in found.frontier)
    yield Text()
    yield Text(f"{'GiB':>8}{'tokens/s':>11}  speed against memory (~ from plans of fewer layers)", "bold")
    for point in found.frontier:
        speed = point.tokens_per_second
        mark = " " if point.planned else "~"
        bar = strokes.used * round(20 * (speed or 0.0) / (fastest or 1.0))
        figure = f"{speed:,.0f}" if speed is not None else "-"
        settings = " ".join(item.partition(".")[2] for item in point.overrides) or "as written"
        head = f"{mark}{point.device_bytes / plan_text.GIB:7.2f}{figure:>11}  {bar:20} "
        lines = Text(settings).wrap(Console(width=width), max(width - len(head), LEAST_SETTINGS))
        yield Text(head) + lines[0]
        yield from (Text(" " * len(head)) + line for line in lines[1:])


def _tail(found: Found, width: int) -> Iterator[Text]:
    yield Text()
    yield from wrapped(found.looked_at, width)
    if found.overrides and found.fits:
        yield Text()
        yield Text("To paste", "bold")
        yield Text(" ".join(f"'{item}'" if " " in item or "[" in item else item for item in found.overrides))


HEIGHT, LEFT, BOTTOM, TOP = 320, 70, 44, 24
"""Size of the plot and its margins, in units of the view box."""

Scale = Callable[[float, float], tuple[float, float]]
"""(bytes, tokens per second) -> position in the drawing."""


def fit_page(title: str, found: Found) -> str:
    """Page with verdict, plot, changes, and overrides to paste."""
    verdict = plan_text.verdict(found.plan)
    lead = title if found.fits else f"{title}: nothing that was searched fits; the closest"
    parts = [
        f'<h1 class="{"fits" if found.fits else "over"}">{escape(lead)} {escape(verdict.headline)}</h1>',
        *(f'<p class="soft">{escape(remark)}</p>' for remark in (*verdict.details, *found.remarks)),
        *_plot(found),
        "<h2>What changed</h2>",
        _changes_table(found.changes),
        *items("To paste", found.overrides if found.fits else ()),
        f'<p class="soft">{found.looked_at}.</p>',
    ]
    return document(f"Fit of {title}", parts)


def _plot(found: Found) -> Iterator[str]:
    """The plot; empty if fewer than two points have a known speed."""
    points = [point for point in found.frontier if point.tokens_per_second]
    if len(points) < 2:
        return
    yield "<h2>Speed against memory</h2>"
    yield f'<div class="scroll">{frontier_svg(points, found)}</div>'
    hollow = "hollow points are from plans of fewer layers" if any(not point.planned for point in points) else ""
    yield f'<p class="legend"><span>tokens/s over the upper end of bytes on the card</span><span>{hollow}</span></p>'


def frontier_svg(points: Sequence[Point], found: Found) -> str:
    """The Pareto points joined, the card's limit as a line, and the proposal marked."""
    usable = found.plan.device.usable_bytes or 0
    widest = 1.08 * max(usable, *(point.device_bytes for point in points))
    fastest = 1.1 * max(point.tokens_per_second or 0.0 for point in points)

    def at(bytes_: float, speed: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 20) * bytes_ / widest
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - speed / fastest)

    places = [at(point.device_bytes, point.tokens_per_second or 0.0) for point in points]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [*_frontier_axes(at, widest, fastest), f'<path class="mark" d="{line}"/>']
    for (x, y), point in zip(places, points, strict=True):
        settings = " ".join(point.overrides) or "as written"
        title = f"{settings}: {plan_text.size(point.device_bytes)}, {point.tokens_per_second:,.0f} tokens/s"
        kind = "planned" if point.planned else "sketched"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(title)}</title></circle>'
        )
    if usable:
        x, _ = at(usable, 0)
        parts.append(f'<path class="limit" d="M{x:.1f} {TOP - 8}V{HEIGHT - BOTTOM}"/>')
        parts.append(text(x - 4, TOP - 12, f"{plan_text.size(usable)} usable", "end"))
    if found.plan.step is not None:
        x, y = at(found.plan.peak.device_bytes_upper, found.plan.step.tokens_per_second)
        parts.append(f'<circle class="fits" cx="{x:.1f}" cy="{y:.1f}" r="9"><title>the proposal</title></circle>')
    return svg(WIDTH, HEIGHT, "Tokens a second against bytes on the device", parts)


def _frontier_axes(at: Scale, widest: float, fastest: float) -> Iterator[str]:
    x0, y0 = at(0, 0)
    x1, y1 = at(widest, fastest)
    yield f'<path d="M{x0:.1f} {y1:.1f}V{y0:.1f}H{x1:.1f}"/>'
    for bytes_ in ticks(0, widest / plan_text.GIB):
        x, _ = at(bytes_ * plan_text.GIB, 0)
        yield text(x, y0 + 16, f"{bytes_:g} GiB", "middle")
    for speed in ticks(0, fastest):
        _, y = at(0, speed)
        yield text(LEFT - 8, y, f"{speed:,.0f}", "end")


def _changes_table(changes: Sequence[Change]) -> str:
    if not changes:
        return '<p class="soft">Nothing: this is the fastest that was found.</p>'
    rows = "".join(
        f"<tr><td>{escape(change.key)} {escape(format_value(change.old))} → {escape(format_value(change.new))}"
        f'<p class="soft">{escape(change.why)}</p></td>{"".join(f"<td>{cell}</td>" for cell in _cells(change))}</tr>'
        for change in changes
    )
    heading = "<tr><th>Change</th><th>memory</th><th>a step</th><th>training</th></tr>"
    return scrolling(f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>")

"""What a search proposes, as lines for a terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from framework.memory.levers import word
from framework.memory.search.found import Change, Found
from framework.reports import plan_text
from framework.reports.terminal import BLOCKS, LEAST_WIDTH, Strokes, table, wrapped

LEAST_SETTINGS = 24
"""Characters of a line that the settings of a point have at least."""


def fit_lines(title: str, found: Found, width: int = 80, strokes: Strokes = BLOCKS) -> list[Text]:
    """The proposal, what each change buys, the trade of speed against memory, and the words to paste."""
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
        yield from wrapped(f"this machine has no room for it: {found.shortage}", width)
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
    yield from table([heading, *(_row(change) for change in found.changes)])
    yield Text()
    for change in found.changes:
        yield from wrapped(f"{change.key.rpartition('.')[2]}: {change.why}", width)


def _row(change: Change) -> tuple[str, str, str, str]:
    memory = "-" if change.saves_bytes is None else plan_text.signed_size(-change.saves_bytes)
    costs = "-" if change.costs_seconds is None else f"{change.costs_seconds:+.3f} s"
    return (
        f"{change.key} {word(change.old)} -> {word(change.new)}",
        memory,
        costs,
        "same" if change.exact else "CHANGED",
    )


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

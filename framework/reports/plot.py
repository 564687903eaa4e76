"""Plots of a run's metrics over its steps as inline SVG of bounded size."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from framework.escaping import escape
from framework.reports.page import WIDTH, svg, text, ticks
from framework.reports.run_files import Point, Series

BUCKETS = 400
"""A curve with more than four times as many points is reduced to the first, least, greatest and last point per bucket,
which covers the same area in the 700 units of a drawing."""
FEW = 60
"""Most points with marks."""
LARGEST_RATIO = 100
"""Ratio of greatest to least value above which a scale is logarithmic, if all values are positive."""
LEAST_SPAN = 1e-200
"""Smallest range; below it the arithmetic of a scale underflows."""
LEAST_SHARE = 1e-3
"""Smallest relative range; below it the ticks of an axis would all show the same figure."""
LEAST_SMOOTHED, WINDOWS = 120, 60
"""Fewest points of a curve with a drawn mean, and the number of the mean's windows side by side."""


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and its margins, in units of the view box."""

    width: int
    height: int
    left: int = 74
    right: int = 16
    top: int = 12
    bottom: int = 30


LARGE, SMALL = Frame(WIDTH, 300), Frame(430, 190)


@dataclass(frozen=True)
class Curve:
    """One metric over the steps. `style` is a class of the page's style sheet."""

    name: str
    style: str
    series: Series
    is_marked: bool = False
    """Whether points have marks if there are few, for metrics not measured at every step."""
    is_noisy: bool = False
    """Whether its moving average is drawn too."""

    @property
    def mean(self) -> tuple[list[Point], int]:
        """The moving average and its window; no points if there are too few."""
        return smoothed(self.series.points) if self.is_noisy else ([], 0)


@dataclass(frozen=True)
class Level:
    """A value to compare the curves with, as a horizontal line."""

    name: str
    style: str
    value: float


@dataclass(frozen=True)
class Moment:
    """A step with an event, as a vertical line."""

    step: int
    name: str


@dataclass(frozen=True)
class Scale:
    """Mapping from values to shares of an axis."""

    low: float
    high: float
    is_logarithmic: bool = False
    unit: float = 1.0
    """Unit in which ticks are round numbers."""

    def share(self, value: float) -> float:
        if self.is_logarithmic:
            start = math.log10(self.low)
            return (math.log10(value) - start) / (math.log10(self.high) - start)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        if not self.is_logarithmic:
            return [tick * self.unit for tick in ticks(self.low / self.unit, self.high / self.unit)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        every = (last - first) // 6 + 1
        return [10.0**power for power in range(first, last + 1, every)]


def scale_of(values: Sequence[float], from_zero: bool = False) -> Scale:
    """A scale for all values with some margin; logarithmic if they differ by orders of magnitude."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0) * 1.06
    elif low > LEAST_SPAN and high / low > LARGEST_RATIO:
        return Scale(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.001)), True)
    else:
        room = (high - low) * 0.06 if high - low > LEAST_SHARE * abs(high) else abs(high) * 0.05
        low, high = low - room, high + room
    return Scale(low, high) if high - low > LEAST_SPAN else Scale(low, low + 1)


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """Reduce to at most four points in each of `buckets` equal spans of steps, including least and greatest value."""
    if len(points) <= 4 * buckets:
        return list(points)
    start, span = points[0][0], points[-1][0] - points[0][0] + 1
    kept: list[Point] = []
    held: list[Point] = []
    at = 0
    for point in points:
        bucket = (point[0] - start) * buckets // span
        if bucket != at:
            kept += _corners(held)
            held, at = [], bucket
        held.append(point)
    return kept + _corners(held)


def _corners(points: Sequence[Point]) -> list[Point]:
    if not points:
        return []
    least, greatest = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    return sorted({points[0], least, greatest, points[-1]})


def smoothed(points: Sequence[Point]) -> tuple[list[Point], int]:
    """The moving average of points and its window; no points if there are too few."""
    if len(points) < LEAST_SMOOTHED:
        return [], 0
    reach = max(len(points) // WINDOWS // 2, 2)
    sums = list(accumulate((value for _, value in points), initial=0.0))
    spans = ((max(at - reach, 0), min(at + reach + 1, len(points))) for at in range(len(points)))
    return [
        (step, (sums[end] - sums[begin]) / (end - begin)) for (step, _), (begin, end) in zip(points, spans, strict=True)
    ], 2 * reach + 1


def plot_svg(
    title: str,
    curves: Sequence[Curve],
    figure: Callable[[float], str],
    levels: Sequence[Level] = (),
    moments: Sequence[Moment] = (),
    frame: Frame = LARGE,
    from_zero: bool = False,
    unit: float = 1.0,
) -> str:
    """Draw curves with axes; `figure` formats a value, and ticks are round in `unit`.

    Values that were not finite are marked at the upper edge. At least one curve must have a point.
    """
    values = [value for curve in curves for _, value in curve.series.points]
    upright = replace(scale_of([*values, *(level.value for level in levels)], from_zero), unit=unit)
    ends = [step for curve in curves for step in (*(step for step, _ in curve.series.points), *curve.series.broken)]
    along = Scale(0, max(*ends, 1))
    bottom, height = frame.height - frame.bottom, frame.height - frame.bottom - frame.top

    def at(step: float, value: float) -> tuple[float, float]:
        across = frame.left + (frame.width - frame.left - frame.right) * along.share(step)
        return across, bottom - height * upright.share(value)

    parts = [*_axes(at, along, upright, figure, frame)]
    for level in levels:
        _, y = at(0, level.value)
        parts.append(f'<path class="{level.style}" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
    for moment in moments:
        x, _ = at(moment.step, upright.low)
        parts.append(
            f'<path class="moment" d="M{x:.1f} {frame.top}V{bottom}"><title>{escape(moment.name)}</title></path>'
        )
    for curve in curves:
        parts += _curve(curve, at, frame)
    return svg(frame.width, frame.height, title, parts)


Place = Callable[[float, float], tuple[float, float]]
"""(step, value) -> position in the drawing."""


def _axes(at: Place, along: Scale, upright: Scale, figure: Callable[[float], str], frame: Frame) -> Iterator[str]:
    bottom = frame.height - frame.bottom
    for value in upright.ticks:
        _, y = at(along.low, value)
        yield f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>'
        yield text(frame.left - 8, y, figure(value), "end")
    whole = [step for step in ticks(along.low, along.high, frame.width // 110) if step == int(step)]
    for step in whole:
        x, _ = at(step, upright.low)
        is_last = x > frame.width - frame.right - 20
        yield text(
            frame.width - frame.right if is_last else x, bottom + 15, f"{step:,.0f}", "end" if is_last else "middle"
        )
    yield text(frame.left - 8, bottom + 15, "step", "end")
    yield f'<path class="axis" d="M{frame.left} {frame.top}V{bottom}H{frame.width - frame.right}"/>'


def _curve(curve: Curve, at: Place, frame: Frame) -> Iterator[str]:
    points, (mean, _) = curve.series.points, curve.mean
    faint = " faint" if mean else ""
    yield _line(thinned(points), curve.series.broken, at, f"{curve.style}{faint}")
    if mean:
        yield _line(thinned(mean), curve.series.broken, at, curve.style)
    if len(points) == 1 or (curve.is_marked and len(points) <= FEW):
        for step, value in points:
            x, y = at(step, value)
            yield f'<circle class="{curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    for step, _ in thinned([(step, 0.0) for step in curve.series.broken]):
        x, _ = at(step, points[0][1] if points else 0)
        yield f'<path class="broken" d="M{x:.1f} {frame.top}v10"/>'


def _line(points: Sequence[Point], broken: Sequence[int], at: Place, style: str) -> str:
    """A line through the points, with gaps at values that were not finite."""
    if not points:
        return ""
    words, gaps = [], iter(broken)
    gap = next(gaps, math.inf)
    command = "M"
    for step, value in points:
        if gap < step:
            command = "M"
            gap = next((later for later in gaps if later > step), math.inf)
        x, y = at(step, value)
        words.append(f"{command}{x:.1f} {y:.1f}{'h0' if command == 'M' else ''}")
        command = "L"
    return f'<path class="{style}" d="{"".join(words)}"/>'

"""Curves: thinning of very many points, scales, gaps and marks."""

import math
import random
import re

import pytest

from framework.reports.page import ticks
from framework.reports.plot import (
    BUCKETS,
    LARGE,
    SMALL,
    Curve,
    Level,
    Moment,
    plot_svg,
    scale_of,
    smoothed,
    thinned,
)
from framework.reports.run_files import Series
from tests.reports.test_page import Reader


def curve(values, broken=(), **more):
    return Curve("loss", "first", Series(tuple(enumerate(values, 1)), broken), **more)


def lines(drawing: str, style: str) -> list[str]:
    tags = Reader(drawing).tags
    return [str(found["d"]) for tag, found in tags if tag == "path" and str(found["class"]).startswith(style)]


def test_thinning_keeps_every_spike_and_both_ends():
    generator = random.Random(0)
    points = [(number, generator.gauss(0, 1)) for number in range(1, 100_001)]
    for number, height in ((777, 50.0), (99_998, -50.0)):
        points[number] = (points[number][0], height)
    kept = thinned(points)
    assert len(kept) <= 4 * BUCKETS
    assert {points[0], points[-1], points[777], points[99_998]} <= set(kept) <= set(points)
    assert kept == sorted(kept)
    for start in range(0, 100_000, 10_000):
        part = points[start : start + 10_000]
        there = [value for number, value in kept if start < number <= start + 10_000]
        assert (max(there), min(there)) == (max(value for _, value in part), min(value for _, value in part))


def test_few_points_are_all_kept():
    points = [(number, float(number % 7)) for number in range(4 * BUCKETS)]
    assert thinned(points) == points


def test_the_mean_is_of_the_values_around():
    mean, around = smoothed([(number, float(number % 2)) for number in range(1000)])
    assert around == 17
    assert mean[500][1] == pytest.approx(8 / 17)
    assert mean[0][1] == pytest.approx(4 / 9), "at the ends it is of those that there are"
    assert smoothed([(1, 1.0)] * 10) == ([], 0)


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0], [-5.0], [0.0, 0.0], [1e199, -1e199], [5e-324, 0.0], [1e-190, 1e190], [1.0, 1.0 + 1e-15], [3, 4]],
)
@pytest.mark.parametrize("from_zero", [True, False])
def test_every_scale_holds_its_values(values, from_zero):
    scale = scale_of(values, from_zero)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in values)
    assert 1 <= len(scale.ticks) <= 8
    assert all(math.isfinite(tick) for tick in scale.ticks)


def test_a_scale_is_logarithmic_where_values_differ_by_orders_of_magnitude():
    scale = scale_of([0.02, 700.0])
    assert scale.is_logarithmic
    assert (scale.low, scale.high) == (pytest.approx(0.01), 1000)
    assert scale.share(10.0) == pytest.approx(0.6)
    assert not scale_of([0.0, 700.0]).is_logarithmic
    assert not scale_of([0.02, 700.0], from_zero=True).is_logarithmic


def test_ticks_are_round_at_every_size():
    assert ticks(0, 24) == [0, 5, 10, 15, 20]
    assert ticks(0, 9e-5) == pytest.approx([0, 2e-5, 4e-5, 6e-5, 8e-5])
    assert ticks(2.91, 3.32) == pytest.approx([3.0, 3.1, 3.2, 3.3])


def test_values_stand_where_the_scale_says():
    drawing = plot_svg("Loss", [curve([1.0, 3.0])], str, [Level("most", "limit", 4.0)], frame=LARGE, from_zero=True)
    [line], [level] = lines(drawing, "first"), lines(drawing, "limit")
    right, bottom = LARGE.width - LARGE.right, LARGE.height - LARGE.bottom
    height = bottom - LARGE.top
    (x1, y1), (x2, y2) = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", line)]
    assert (x1, x2) == (pytest.approx((LARGE.left + right) / 2), pytest.approx(right))
    assert bottom - y1 == pytest.approx(height * 1 / 4.24, abs=0.1)
    assert bottom - y2 == pytest.approx(height * 3 / 4.24, abs=0.1)
    assert level.startswith(f"M{LARGE.left} {bottom - height * 4 / 4.24:.1f}H")


def test_a_value_that_is_not_finite_is_a_gap_and_a_mark():
    whole, gap = curve([1.0, 2.0, 3.0]), Curve("loss", "first", Series(((1, 1.0), (2, 2.0), (4, 3.0)), (3, 5)))
    assert [len(re.findall("M", line)) for line in lines(plot_svg("a", [whole], str), "first")] == [1]
    drawing = plot_svg("a", [gap], str)
    assert [len(re.findall("M", line)) for line in lines(drawing, "first")] == [2]
    assert len(lines(drawing, "broken")) == 2


def test_one_point_is_seen():
    drawing = plot_svg("a", [curve([1.0])], str, frame=SMALL)
    assert [found["class"] for tag, found in Reader(drawing).tags if tag == "circle"] == ["first"]


def test_names_are_text():
    drawing = plot_svg("<b>", [curve([1.0, 2.0])], str, moments=[Moment(1, "<i>&")])
    assert "<b>" not in drawing
    assert "<title>&lt;i&gt;&amp;</title>" in drawing
    assert "<title>&lt;b&gt;</title>" in drawing
    assert 'role="img"' in drawing


def test_a_noisy_curve_is_faint_beneath_its_mean():
    values = [float(number % 5) for number in range(500)]
    drawing = plot_svg("a", [curve(values, is_noisy=True)], str)
    assert len(lines(drawing, "first faint")) == 1
    assert len(lines(drawing, "first")) == 2
    assert len(lines(plot_svg("a", [curve(values)], str), "first")) == 1

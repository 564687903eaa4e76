"""The table and the page of several values of one key."""

import re
from dataclasses import replace

from framework.reports.comparison import what_if_lines, what_if_page
from framework.run.planning.what_if import Row
from tests.reports.plans import GIB, PLAN

LARGE = replace(PLAN, peak=replace(PLAN.peak, device_bytes=2 * PLAN.peak.device_bytes, device_bytes_upper=100 * GIB))
ROWS = [Row("2048", PLAN), Row("<4096>", LARGE), Row("8192", None, "the model has 4096 positions")]


def test_a_row_for_each_value_with_its_verdict():
    lines = [line.plain for line in what_if_lines("mine", "model.model_max_length", ROWS)]
    assert lines[0] == "mine, by model.model_max_length"
    verdicts = [re.search(r"fits|does not fit|refused", line) for line in lines[3:6]]
    assert [found and found.group() for found in verdicts] == ["fits", "does not fit", "refused"]
    assert lines[3].endswith(f"{PLAN.step.tokens_per_second:,.0f}")
    assert lines[6] == "8192: the model has 4096 positions"
    assert [row.fits for row in ROWS] == [True, False, False]


def test_the_page_has_a_bar_for_each_plan_in_proportion():
    page = what_if_page("mine", "model.model_max_length", ROWS)
    first, second = (float(width) for width in re.findall(r'<rect class="weights"[^>]* width="([\d.]+)"', page))
    assert abs(second / first - 2) < 0.01
    assert "<4096>" not in page
    assert "the model has 4096 positions" in page
    assert page.count('class="scroll"') == 2, "plot and table scroll by themselves on a phone"

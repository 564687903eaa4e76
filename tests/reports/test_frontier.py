"""The page of a fit: well-formed, in need of nothing else, and with every figure that the terminal has."""

import re

from framework.reports.fit import fit_lines, fit_page
from framework.reports.plan_text import size
from tests.memory.search.test_fastest import config_on
from tests.memory.search.test_find import found_on
from tests.reports.test_page import Reader


def test_each_point_is_a_mark_with_its_settings_and_figures() -> None:
    found = found_on(config_on(4000))
    page = fit_page("tiny", found)
    marks = [attributes for tag, attributes in Reader(page).tags if tag == "circle" and attributes["r"] == "4.5"]
    assert len(marks) == len(found.frontier) > 2
    across = [float(mark["cx"] or 0) for mark in marks]
    upwards = [-float(mark["cy"] or 0) for mark in marks]
    assert across == sorted(across), "more memory is further right"
    assert upwards == sorted(upwards), "and each is faster than the one before"
    for point in found.frontier:
        assert f"{size(point.device_bytes)}, {point.tokens_per_second:,.0f} tokens/s" in page


def test_it_says_what_the_terminal_says_and_refers_to_nothing_outside() -> None:
    found = found_on(config_on(4000))
    page = fit_page("<tiny>", found)
    reader = Reader(page)
    message = " ".join(reader.words)
    assert "<tiny>" in message, "a name is text, never markup"
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "tiny"}
    assert not re.search(r"https?:|//|url\(|@import", page)
    table = [str(line) for line in fit_lines("tiny", found)]
    for change in found.changes:
        assert change.key in message
        assert any(change.key in line for line in table)
    assert set(found.overrides) <= set(reader.words)


def test_where_nothing_fits_there_is_nothing_to_paste() -> None:
    found = found_on(config_on(100))
    assert not found.fits
    page = fit_page("tiny", found)
    assert "nothing that was searched fits" in page
    assert "To paste" not in page

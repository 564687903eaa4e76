"""The page of a plan: complete, well-formed, and in need of nothing else."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from framework.memory.ledger import Plan, ShardDtypes, Terms
from framework.reports.page import COLOURS, LEFT, RIGHT, WIDTH, plan_page
from framework.reports.plan_text import MEASURED as KEYS
from framework.reports.plan_text import TERMS, facts, measured_document, measured_rows, size, verdict
from tests.reports.plans import BACKWARD, GIB, PLAN, on
from tests.reports.test_terminal import MEASURED


class Reader(HTMLParser):
    """Text, tags and attributes of a page; fails where a tag is not closed."""

    EMPTY = ("meta", "path", "rect", "!doctype")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def bars(plan: Plan) -> list[dict[str, str | None]]:
    return [attributes for tag, attributes in Reader(plan_page("tiny", plan)).tags if tag == "rect"]


@pytest.mark.parametrize("plan", [PLAN, on(None, "cpu"), on(4)], ids=["fits", "cpu", "over"])
def test_it_refers_to_nothing_outside_itself(plan: Plan) -> None:
    page = plan_page("tiny", plan, MEASURED)
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "use"}
    assert not [name for _, attributes in reader.tags for name in attributes if name in ("src", "href", "action")]
    assert not re.search(r"https?:|//|url\(|@import", page)


def test_it_says_what_the_terminal_says() -> None:
    text = " ".join(Reader(plan_page("tiny", PLAN, MEASURED)).words)
    texts = [verdict(PLAN).headline, *verdict(PLAN).details, *PLAN.assumptions, *PLAN.warnings]
    texts += [word for fact in facts(PLAN) for word in fact]
    texts += [word for row in measured_rows(PLAN, MEASURED) for word in (row.name, row.predicted, row.measured)]
    texts += [word for key, count in BACKWARD.to_json().items() if count for word in (TERMS[key], size(count))]
    assert [word for word in texts if word not in text] == []


def test_names_are_escaped() -> None:
    odd = replace(PLAN, assumptions=("<b>&</b>",))
    page = plan_page("<script>alert(1)</script>", odd)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page


def test_segments_stand_end_to_end_and_add_up() -> None:
    own = [bar for bar in bars(PLAN) if bar["y"] == bars(PLAN)[2]["y"]]
    assert [bar["class"] for bar in own] == [key for key, count in BACKWARD.to_json().items() if count]
    edge = float(LEFT)
    for bar in own:
        assert float(bar["x"] or 0) == pytest.approx(edge, abs=0.02)
        edge += float(bar["width"] or 0)
    assert edge - LEFT == pytest.approx((WIDTH - LEFT - RIGHT) * 20 / 24, abs=0.1)


def test_the_line_stands_where_the_card_ends() -> None:
    for usable, longest in ((24, 24), (10, 21)):
        at = LEFT + (WIDTH - LEFT - RIGHT) * usable / longest
        assert f'class="limit" d="M{at:.1f} ' in plan_page("tiny", on(usable))
    assert 'class="limit"' not in plan_page("tiny", on(None))


def test_every_term_has_a_name_and_a_colour_of_its_own() -> None:
    assert set(TERMS) == set(COLOURS) == set(Terms().to_json())
    assert len(set(TERMS.values())) == len(set(COLOURS.values())) == len(TERMS)


def test_light_and_dark() -> None:
    page = plan_page("tiny", PLAN)
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def test_measured_has_the_keys_of_the_contract_and_no_others() -> None:
    assert measured_document(MEASURED) == {
        "device_name": "NVIDIA GeForce RTX 4090",
        "allocated_bytes": 18 * GIB,
        "reserved_bytes": 20 * GIB,
        "device_bytes": 20 * GIB,
        "step_seconds": 0.4,
        "tokens_per_second": 5120.0,
    }
    assert tuple(measured_document(MEASURED)) == KEYS


def test_the_dtypes_of_shards_are_a_table() -> None:
    page = plan_page("tiny", replace(PLAN, shards=(ShardDtypes("frozen", "4 bits in bfloat16", "bfloat16"),)))
    assert "<td>4 bits in bfloat16</td><td>bfloat16</td><td>-</td><td>-</td>" in page
    assert '<th scope="col">stepped</th>' in page
    assert "stepped" not in plan_page("tiny", PLAN)

"""docs/levers.md says what the table says, and every measured row that it names can be measured."""

import json

from benchmarks import levers_page
from benchmarks.levers import rows
from framework.memory.levers import LEVERS


def test_the_page_is_what_the_table_and_the_measurements_say():
    assert levers_page.PAGE.read_text() == levers_page.page(), "run: python benchmarks/levers_page.py"


def test_every_lever_has_a_section():
    page = levers_page.page()
    assert [key for key in (row.key for row in LEVERS) if f"\n## `{key}`\n" not in page] == []


def test_the_rows_that_claims_rest_on_exist():
    known = {row.name for row in rows().found.values()}
    keys = {row.key.partition(".")[2] for row in LEVERS} | {"base"}
    claimed = {name for claim in levers_page.CLAIMS for name in claim.rows}
    built = {name for name in claimed if name.partition("/")[2].partition("=")[0] in keys}
    assert built - known == set()


def test_a_measured_saving_is_shown_with_its_setting_and_its_claim(tmp_path, monkeypatch):
    figures = {"saved_bytes": 13 * 2**30, "saved_per_cent": 40.0, "tokens_per_second_per_cent": -15.9}
    setting = {"key": "training.enable_gradient_checkpointing", "value": "true", "base": "m1/base"}
    setting |= {"row": "m1/enable_gradient_checkpointing=true", "against_first": figures}
    document = {"machine": "a card", "packages": {}, "date": "2026-11-28", "rows": 1, "settings": [setting]}
    document |= {"allocated_error_per_cent": {"median": 0.1, "max": 0.2}, "figures": [], "not_measured": {"x": "why"}}
    file = tmp_path / "levers.json"
    file.write_text(json.dumps(document))
    monkeypatch.setattr(levers_page, "RESULTS", file)
    page = levers_page.page()
    assert page.count("-13.00 GiB (-40 %), -15.9 % tokens/s") == 2
    assert "- `x`: why" in page


def test_a_claim_shows_the_setting_that_its_row_is_called_for():
    """The row with checkpoints is the policy `full` too, whose figures are against another policy."""
    lines = levers_page.page().splitlines()
    lever, claim = (
        next(line for line in lines if line.startswith(start))
        for start in ("| `true` | - | exact | -17.5 %", "| Checkpointing costs")
    )
    figures = lever.rpartition("m1: ")[2].partition(";")[0]
    assert f"m1/enable_gradient_checkpointing=true: {figures};" in claim

"""The tables: every key of ours that they name is one, and reasons are known."""

from pathlib import Path

import pytest

from framework.converters import tables
from framework.converters.tables import WHY, table
from framework.schema.config import TrainingConfig
from framework.schema.keys import dotted, every_key, values

TOOLS = ("axolotl", "litgpt", "llamafactory", "oumi", "torchtune")
PARTS = ("same", "values", "defaults", "left")


def groups(name: str) -> list[dict]:
    whole = table(name)
    inner = [rows for rows in whole.values() if isinstance(rows, dict) and rows.keys() <= set(PARTS)]
    return [whole, *inner]


def test_each_tool_has_a_table() -> None:
    folder = Path(tables.__file__).parent / "tables"
    assert {file.stem for file in folder.glob("*.yaml")} == {*TOOLS, "transformers"}


@pytest.mark.parametrize("name", TOOLS)
def test_tables_name_keys_of_ours_and_known_reasons(name) -> None:
    known = {dotted(path) for path, _ in values(TrainingConfig())} | {*every_key(), "nothing"}
    named = set()
    for rows in groups(name):
        named |= set(rows.get("same", {}).values())
        for targets in [*rows.get("values", {}).values(), *rows.get("defaults", {}).values()]:
            named |= targets.keys()
        assert rows.get("left", {}).keys() <= WHY.keys()
    assert named - known == set()

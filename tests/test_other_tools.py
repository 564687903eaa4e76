"""The page that compares: the tests that it names are there, so are its keys, and its recipes pass the check."""

import re
from pathlib import Path

import pytest

from framework.checks import check_request
from framework.cli.app import app
from framework.schema.keys import root

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "other_tools.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")][
    2:
]
EXAMPLES = re.findall(r"^### ([^\n]+), (\d+) lines\)\n\n```yaml\n(.*?)```", PAGE, re.M | re.S)


def test_each_row_names_a_test_that_is_there_or_says_no() -> None:
    assert len(ROWS) >= 30
    for what, here, *_, shown in ROWS:
        if here == "**no**":
            assert not shown, what
            continue
        place = ROOT / shown.strip("`")
        files = list(place.rglob("test_*.py")) if place.is_dir() else [place]
        assert files, what
        assert any("def test_" in file.read_text() for file in files), what


def test_what_is_here_is_a_key_or_a_verb() -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    for what, here, *_ in ROWS:
        for name in re.findall(r"`([^`]+)`", here):
            if name.startswith("tunesmith "):
                assert name.split()[1] in verbs, what
                continue
            found = root()
            for part in name.partition(":")[0].split("."):
                found = found.children[part]


def test_there_are_ten_examples_of_all_six_tools() -> None:
    assert len(EXAMPLES) == 10
    tools = {title.partition(":")[0] for title, *_ in EXAMPLES}
    assert tools == {"Axolotl", "LLaMA-Factory", "torchtune", "Oumi", "TRL", "Unsloth"}


@pytest.mark.parametrize(("title", "lines", "recipe"), EXAMPLES, ids=[title for title, *_ in EXAMPLES])
def test_an_example_passes_the_check_in_no_more_lines(title, lines, recipe, tmp_path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    assert recipe.count("\n") <= int(lines)
    assert check_request(file, ["gpu=h100_80gb"]).problems == ()

"""The training files of other tools as they publish them: each is converted or refused, and no value of one is lost."""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from framework.checks import check_request
from framework.compose.reading import read
from framework.converters import Conversion, convert
from framework.converters.translation import Source, Why
from framework.errors import RequestError
from tests.grids import chosen

PEERS = Path(os.environ.get("TUNESMITH_PEERS", "peers"))
TOOLS = {
    "oumi": (92, 64), "axolotl": (136, 106), "llamafactory": (34, 25), "torchtune": (93, 86), "litgpt": (33, 33),
}  # fmt: skip
"""Folder of `TUNESMITH_PEERS` -> its files, and how many of them are recipes of ours."""
NOT_OURS = ("not ours for now", "trains nothing", "generates")

pytestmark = pytest.mark.skipif(
    not PEERS.is_dir(), reason="TUNESMITH_PEERS names no folder with the files of other tools"
)


def files(tool: str) -> list[Path]:
    return sorted((PEERS / tool).glob("*.y*ml"))


@cache
def outcome(file: Path) -> Conversion | RequestError:
    try:
        return convert(file)
    except RequestError as error:
        return error


def recipes(tool: str) -> list[tuple[Path, Conversion]]:
    return [(file, found) for file in files(tool) if isinstance(found := outcome(file), Conversion)]


@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_every_file_is_converted_or_refused_with_the_reason(tool) -> None:
    refused = [found for file in files(tool) if isinstance(found := outcome(file), RequestError)]
    assert (len(files(tool)), len(recipes(tool))) == TOOLS[tool]
    for error in refused:
        assert error.exit_code == 2
        (problem,) = error.problems
        assert any(phrase in problem.message for phrase in NOT_OURS), problem.message
        assert problem.where
        assert problem.where.rpartition(":")[2].isdecimal()


@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_no_value_is_lost(tool) -> None:
    for file, found in recipes(tool):
        root = read(file, str(file), "recipe", [])
        assert root is not None
        leaves = set(Source(root, str(file)).leaves)
        assert leaves == plain_leaves(yaml.safe_load(file.read_text()))
        assert leaves - set(found.carried) == {row.key for row in found.left} - set(found.carried), file
        assert all(row.text for row in found.left if row.why is Why.WRITE), file


def plain_leaves(value, key: str = "") -> set[str]:
    """The dotted keys of scalars, lists of scalars and empty mappings."""
    if isinstance(value, dict) and value:
        return {leaf for name, child in value.items() for leaf in plain_leaves(child, f"{key}.{name}" if key else name)}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return {leaf for index, item in enumerate(value) for leaf in plain_leaves(item, f"{key}[{index}]")}
    return {key}


def problems(file: Path, found: Conversion, folder: Path) -> list[str]:
    recipe = folder / f"{file.stem}.yaml"
    recipe.write_text(found.recipe)
    named = re.search(r"--nproc (\d+)", found.recipe)
    shared = [f"gpu.count={named[1] if named else 8}"] if "fsdp" in yaml.safe_load(found.recipe) else []
    return [str(problem) for problem in check_request(recipe, ["gpu=h100_80gb", *shared]).problems]


@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_the_recipes_pass_the_check(tool, tmp_path) -> None:
    """Every eighth; the test below takes all."""
    assert {file.name: found for file, row in recipes(tool)[::8] if (found := problems(file, row, tmp_path))} == {}
    assert not [file for file, row in recipes(tool) if row.warnings]


@pytest.mark.slow
@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_all_recipes_pass_the_check(tool, tmp_path) -> None:
    assert {file.name: found for file, row in recipes(tool) if (found := problems(file, row, tmp_path))} == {}


@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_recipes_stay_short_and_most_values_are_carried(tool) -> None:
    lengths = [row.recipe.count("\n") for _, row in recipes(tool)]
    assert max(lengths) <= 32
    assert sum(lengths) / len(lengths) <= 24
    settled: Counter[str] = Counter()
    for _, row in recipes(tool):
        named = {left.key: left.why for left in row.left if left.key not in row.carried}
        settled["carried"] += len(row.carried)
        settled.update(named.values())
    assert settled["carried"] + settled[Why.DEFAULT] >= 0.8 * settled.total()


NAMES = {"oumi": "Oumi", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}


@pytest.mark.parametrize("tool", chosen(("llamafactory", "litgpt"), TOOLS))
def test_the_page_has_these_counts(tool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {NAMES.get(tool, tool)} |"))
    found = [row for _, row in recipes(tool)]
    counts = [len(files(tool)), len(found), sum(row.total for row in found), sum(len(row.carried) for row in found)]
    assert [cell.strip() for cell in row.split("|")[2:6]] == [f"{count:,}" for count in counts]

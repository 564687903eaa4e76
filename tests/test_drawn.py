"""The rows that a seed draws for a card, and the processes that they are measured in."""

import json
from pathlib import Path

import pytest

from benchmarks.drawn import SINGLE, config_of, drawn
from benchmarks.drawn_grid import summary
from benchmarks.rows import Queue, run_rows


@pytest.mark.parametrize(("kind", "count"), [("single", sum(count for _, count in SINGLE.values())), ("sharded", 56)])
def test_a_seed_draws_the_same_rows_each_time_and_another_seed_others(kind, count):
    rows = drawn(kind, 1)
    assert rows == drawn(kind, 1)
    assert len({row["name"] for row in rows}) == len(rows) == count
    assert [row["sections"] for row in rows] != [row["sections"] for row in drawn(kind, 2)]


@pytest.mark.parametrize(("kind", "cards"), [("single", 1), ("sharded", 2)])
def test_hardly_a_row_contradicts_itself(kind, cards):
    made = []
    for row in drawn(kind, 1):
        try:
            made.append(config_of(row))
        except ValueError:
            continue
    assert len(made) >= 0.9 * len(drawn(kind, 1))
    assert {config.gpu.count for config in made} == {cards}


@pytest.fixture(autouse=True)
def _little_is_preloaded(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # set for good where rows are run; undone here
    monkeypatch.setattr("benchmarks.rows.PRELOADED", "torch")


def measured(row):
    """Result of a process, as the row says."""
    if row.get("fails"):
        raise ValueError("no")
    import os

    return {"rank": int(os.environ["RANK"]), "card": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}


@pytest.mark.slow
def test_a_row_that_fails_costs_no_other(tmp_path: Path):
    """Two ranks take row after row; after a failure they are new ones."""
    rows = [{"name": "a"}, {"name": "b", "fails": True}, {"name": "c"}, {"name": "d"}]
    run_rows(rows, measured, tmp_path / "out", [Queue((0, 1), 1)], seconds=200, kept=4)
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["name"] for row in found] == ["a", "b", "c", "d"]
    assert found[1]["error"] == "ValueError: no"
    assert found[0]["pid"] != found[2]["pid"] == found[3]["pid"]
    assert {row["rank"] for row in found if "rank" in row} == {0}


def test_a_row_that_takes_too_long_is_ended(tmp_path: Path):
    run_rows([{"name": "a"}], measured, tmp_path / "out", [Queue((3,), 1)], seconds=0)
    assert json.loads((tmp_path / "out").read_text())["error"] == "timed out"


def test_shares_within_the_limits_are_counted():
    errors = ({"allocated_bytes": 0.05}, {"allocated_bytes": -0.5}, {"allocated_bytes": 3.0})
    rows = [{"error_per_cent": error, "covered": error["allocated_bytes"] > 0} for error in errors]
    found = summary(rows)
    assert found["above_upper_end"] == "1 of 3"
    assert found["allocated_bytes"] == {"median": 0.5, "largest": 3.0, "within_0.1": 1, "within_1": 2}

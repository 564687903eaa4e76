"""Sharded runs on real cards: the losses of one card, and the memory that was planned. `pytest -m gpu`.

Each row is a process group of its own, (benchmarks/sharded.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sharded_rows import CURVES, ROWS, curve_of_one_card, step_config
from framework.run.rehearsal.rehearse import rehearse

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WORLDS = [2, 4]


def measured(world: int, folder: Path, names: list[str]) -> dict[str, dict]:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} cards")
    file = folder / "rows.jsonl"
    subprocess.run([sys.executable, "benchmarks/sharded.py", str(file), str(world), *names], check=True, timeout=1800)
    return {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize("world", WORLDS)
def test_every_strategy_learns_what_one_card_does(world, tmp_path):
    """Within 1e-3 over 50 steps, the same rows in the same global batches."""
    found = measured(world, tmp_path, [row["name"] for row in CURVES])
    for row in CURVES:
        alone = found[curve_of_one_card(row)]["losses"]
        assert found[row["name"]]["losses"] == pytest.approx(alone, rel=1e-3), row["name"]


@pytest.mark.parametrize("world", WORLDS)
def test_the_plan_is_what_the_cards_take(world, tmp_path):
    found = measured(world, tmp_path, [row["name"] for row in ROWS])
    for row in (row for row in ROWS if world >= row.get("cards", 0)):
        plan, real = rehearse(step_config(row, world)).step_peak, found[row["name"]]
        assert plan.allocated_bytes == pytest.approx(real["allocated_bytes"], rel=0.02), row["name"]
        assert plan.reserved_bytes == pytest.approx(real["reserved_bytes"], rel=0.06), row["name"]

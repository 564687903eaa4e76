"""benchmarks/against_fsdp.py: its rows are configs, its ratios those of its rows, and each rival runs on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.against_fsdp import ROWS, TINY, chosen, ratios, summary
from benchmarks.sharded_rows import step_config

MACHINE = {"card": "a card", "driver": "1", "packages": {"torch": "2"}, "cards": 2, "date": "2026-11-28"}
SHAPE = {"micro": 1, "tokens": 2048, "ranks": 2, "gc": True}


def line(name, rate, **other):
    return {"name": name, "tokens_per_second_per_gpu": rate, **SHAPE, **MACHINE, **other}


def test_a_ratio_is_of_medians_and_says_whether_it_holds(tmp_path):
    lines = [line("ours-8b", 90), line("hand-8b", 100), line("accelerate-8b", 75), line("ours-8b", 100)]
    lines += [line("ours-8b", 91), {"name": "alone-1b", "error": "out of memory", **MACHINE}]
    measured, out = tmp_path / "lines.jsonl", tmp_path / "summary.json"
    measured.write_text("".join(json.dumps(one) + "\n" for one in lines))
    summary(measured, out)
    document = json.loads(out.read_text())
    assert document["ratios"] == {
        "ours-8b / hand-8b": {"ratio": 0.91, "at_least": 0.9, "holds": True},
        "ours-8b / accelerate-8b": {"ratio": 1.2133, "at_least": 1.3, "holds": False},
    }
    assert document["rows"]["alone-1b"] == {"error": "out of memory"}
    assert document["rows"]["ours-8b"]["runs"] == [90, 100, 91]


def test_rows_of_two_machines_have_no_ratio(tmp_path):
    measured = tmp_path / "lines.jsonl"
    lines = [line("ours-8b", 90), line("hand-8b", 100, card="another")]
    measured.write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(SystemExit, match="`card` differs"):
        summary(measured, tmp_path / "summary.json")


def test_weak_scaling_is_of_a_card_among_others_to_one_alone():
    rows = {name: {"tokens_per_second_per_gpu": rate} for name, rate in {"alone-1b": 10, "ours-1b-weak": 9.5}.items()}
    assert ratios(rows) == {"ours-1b-weak / alone-1b": {"ratio": 0.95, "at_least": 0.9, "holds": True}}


def test_rivals_have_the_shape_and_the_batch_of_ours():
    rows = {row["name"]: step_config(row, 1 if row["who"] == "alone" else 4) for row in ROWS}
    ours, hand = rows["ours-8b"], rows["hand-8b"]
    assert ours.model.architecture == hand.model.architecture
    assert ours.batch == hand.batch == rows["accelerate-8b"].batch
    assert not rows["alone-1b"].fsdp.is_sharded  # else one card would compute in float32
    assert rows["ours-1b-weak"].batch.per_device == rows["alone-1b"].batch.per_device == 4


def test_a_row_that_there_is_not_is_named():
    with pytest.raises(SystemExit, match="no rows ours-9b; there are alone-1b"):
        chosen(["ours-9b"], False, None)
    (row,) = chosen(["hand-3b"], True, 2)
    assert (row["micro"], row["changes"]) == (2, TINY)


@pytest.mark.slow
def test_each_rival_trains_two_ranks_on_the_cpu(tmp_path):
    names = ["alone-1b", "ours-1b-weak-ddp", "ours-8b", "hand-8b", "hand-3b", "accelerate-8b", "accelerate-8b-gc"]
    out, script = tmp_path / "lines.jsonl", "benchmarks/against_fsdp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, script, str(out), *names, "--tiny"], check=True, timeout=200, cwd=root, env=environment)
    lines = [json.loads(one) for one in out.read_text().splitlines()]
    assert [one["name"] for one in lines] == names
    for one in lines:
        assert "error" not in one, one
        assert len(one["seconds"]) == 8
        assert one["mean_loss"] == pytest.approx(6.92, abs=0.03)  # of 1,000 tokens that nothing can foretell: ln 1000

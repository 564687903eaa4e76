"""Run folders with anything in their files are read as far as they can be, and never an internal fault."""

import json
import shutil

import pytest

from tests.faults.commands import run
from tests.faults.mutations import changed, damaged, dumped
from tests.faults.profile import drawn
from tests.memory.explain.test_moves import FULL, lever, plan
from tests.reports import runs

NAMES = ("plan.json", "memory.json", "environment.json", "metrics.jsonl", "config.yaml", "oom.txt")
REPORT = (
    "phase: backward\nstep: 3\nmicro batch: 8192 tokens\nlargest before: 4096 tokens\n"
    "repaired: training.per_device_train_batch_size 8 -> 4 (backward of step 2)\n"
    f"allocated after each step: {' '.join(str(10**9 + step * 4 * 10**7) for step in range(12))}\n\n{FULL}\n"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that ran out of memory after five steps, and the bytes of its files."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    runs.make_run(folder, [*(runs.step(number) for number in range(1, 6)), runs.evaluation(5, 2.0)])
    runs.write_memory(folder, 5)
    levers = [lever("training.optimizer", {"backward": 2**30}), lever("training.per_device_train_batch_size", None)]
    (folder / "plan.json").write_text(json.dumps(plan(*levers)))
    (folder / "oom.txt").write_text(REPORT)
    return folder, {name: (folder / name).read_bytes() for name in NAMES}


def spoiled(name, data, dice):
    """The file with another value in some place, or other bytes."""
    if name.endswith("json") and dice.random() < 0.6:
        return dumped(changed(json.loads(data), dice))
    if name.endswith("jsonl") and dice.random() < 0.6:
        lines = data.splitlines()
        at = dice.randrange(len(lines))
        lines[at] = dumped(changed(json.loads(lines[at]), dice))
        return b"\n".join(lines)
    return damaged(data, dice)


@drawn(40, 20_000)
def test_a_damaged_file_of_a_run(whole, dice):
    folder, files = whole
    name = dice.choice(NAMES)
    (folder / name).write_bytes(spoiled(name, files[name], dice))
    try:
        verb = dice.choice(["explain"] * 29 + ["report"] + ["show"] * 9 * (name == "config.yaml"))
        arguments = {
            "explain": ["explain", str(folder), "--json"],
            "report": ["report", str(folder)],
            "show": ["show", str(folder / "config.yaml"), dice.choice(["--origin", "--json"])],
        }[verb]
        run(*arguments, writes=[folder] if verb == "report" else [])
    finally:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).write_bytes(files[name])

"""Ten thousand steps take no more memory, files and time at the end than at the beginning."""

import json
from statistics import median

import psutil
import pytest

from framework.run import session as session_module
from tests.faults.tiny_runs import request, write_corpus
from tests.run.test_trainer import train

STEPS = 10_000
MOST_GROWTH = 16 * 2**20
"""Bytes over the last 8,000 steps: 2 KiB a step, less than one tensor or log line that is kept."""
SLOWER = 1.3
"""Of medians of 2,000 steps, on a machine with other things to do."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_steps(tmp_path, monkeypatch):
    process, seen = psutil.Process(), {}
    original = session_module.Session._log

    def log(self, *arguments):
        original(self, *arguments)
        if self.step % 250 == 0:
            seen[self.step] = (process.memory_info().rss, process.num_fds(), len(process.children(recursive=True)))

    monkeypatch.setattr(session_module.Session, "_log", log)
    often = {"max_steps": STEPS, "save_steps": 500, "eval_steps": 1000, "global_batch_size": 2}
    train(request(write_corpus(tmp_path), tmp_path / "run", **often))
    assert len(seen) == STEPS // 250
    warm = {step: figures for step, figures in seen.items() if step >= 2000}
    memory = [resident for resident, _, _ in warm.values()]
    assert max(memory) - memory[0] < MOST_GROWTH, seen
    assert len({(files, children) for _, files, children in warm.values()}) == 1, seen
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    assert len(seconds) == STEPS
    assert median(seconds[-2000:]) < SLOWER * median(seconds[1000:3000])

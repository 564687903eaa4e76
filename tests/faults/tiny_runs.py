"""A run of seconds that saves as it goes, what it comes to when nothing goes wrong, and how one is gone on with."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from framework.errors import RequestError
from framework.run.checkpoints.checkpoint import checkpoints
from framework.schema.config import TrainingConfig
from tests.run.test_trainer import config, final_weights, same, train

STEPS, ROWS = 9, 24


class Whole(NamedTuple):
    """An uninterrupted run."""

    corpus: Path
    folder: Path
    log: list[dict[str, Any]]
    weights: dict[str, Any]


def write_corpus(folder: Path) -> Path:
    """Rows of text of different lengths."""
    file = folder / "rows.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    rows = [{"text": " ".join(words[at % 9 :] * (1 + at % 4)) + f" {at}"} for at in range(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def request(corpus: Path, folder: Path, **training: Any) -> TrainingConfig:
    """Two checkpoints and evaluations on the way and one at the end, with dropout; more than one epoch."""
    often = {"max_steps": STEPS, "save_steps": 3, "eval_steps": 4, "save_total_limit": 2}
    return config(corpus, folder, training={**often, **training})


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without timed and measured values."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shown = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "eval_loss")
    return [{key: line[key] for key in shown if key in line} for line in lines]


def go_on(whole: Whole, folder: Path, **training: Any) -> None:
    """Resume, or begin again where nothing had been saved; it comes to what the uninterrupted run has come to."""
    again = request(whole.corpus, folder, **training)
    if checkpoints(folder):
        train(again, resume=True)
    else:
        with pytest.raises(RequestError):
            train(again, resume=True)
        train(again, overwrite=True)
    assert log_of(folder) == whole.log
    assert same(final_weights(folder), whole.weights)
    differing = names(folder) ^ names(whole.folder)
    assert not differing, differing
    assert len(checkpoints(folder)) == len([*(folder / "checkpoints").iterdir()]) == 2


def names(folder: Path) -> set[str]:
    """Files and folders of a run except its checkpoints, which may be of other steps."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return {str(path) for path in found if path.parts[:1] != ("checkpoints",)}

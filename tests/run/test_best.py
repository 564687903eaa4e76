"""The best checkpoint, the end of a run that does not get better, and when it evaluates and saves."""

import json

import pytest
import torch
from safetensors.torch import load_file

from framework.errors import RequestError
from framework.run.best import Best
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.held_out import HeldOut
from framework.run.trainer import train
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import is_due, steps_between
from framework.schema.rules.evaluation import best_conflicts
from framework.schema.training import TrainingParams
from tests.tiny import LLAMA

LOSSES = [5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 2.0]
"""Losses of a run's evaluations: before the first step, and after each."""


def config(folder, **training):
    architecture = dict(LLAMA)
    architecture.pop("vocab_size")
    rows = [{"text": f"a row of text, number {number}"} for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainingConfig.model_validate(
        {
            "gpu": {"name": "cpu"},
            "model": {
                **{"architecture": architecture, "model_max_length": 16, "load_pretrained_weights": False},
                "tokenizer": {"train": "bpe", "vocab_size": 300},
            },
            "data": {"train": [{"path": str(folder / "rows.jsonl")}], "eval_fraction": 0.2},
            "training": {
                **{"task": "pretrain", "max_steps": 6, "per_device_train_batch_size": 1, "eval_steps": 1},
                **{"output_dir": str(folder / "run"), "learning_rate": 0.01, **training},
            },
        }
    )


@pytest.fixture
def fake_evaluations(monkeypatch):
    """Evaluations that find what a test says, in their order."""

    def tell(losses, start=0):
        left = iter(losses[start:])
        monkeypatch.setattr(HeldOut, "evaluate", lambda _: {"eval_loss": next(left), "perplexity": 1.0})

    return tell


def run(config, **options):
    return train(config, planner=None, quiet=True, **options)


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoints(folder)]


def test_the_best_checkpoint_stays_next_to_the_newest_and_is_exported(tmp_path, fake_evaluations):
    fake_evaluations([*LOSSES[:6], 4.5])
    asked = config(tmp_path, best_metric="eval_loss", export_best=True, save_total_limit=1)
    folder = run(asked).folder
    assert steps(folder) == [2, 6]
    best = json.loads((folder / "best.json").read_text())
    assert best == {"metric": "eval_loss", "step": 2, "value": 3.0, "since": 0, "checkpoint": "step-00000002"}
    exported, stored = (
        load_file(file)
        for file in (folder / "final/model.safetensors", folder / "checkpoints/step-00000002/model.safetensors")
    )
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in exported)
    last = load_file(folder / "checkpoints/step-00000006/model.safetensors")
    assert any(not torch.equal(exported[name], last[name]) for name in exported)


def test_the_last_evaluation_may_be_the_best(tmp_path, fake_evaluations):
    fake_evaluations(LOSSES)
    folder = run(config(tmp_path, best_metric="eval_loss", export_best=True, save_total_limit=1)).folder
    assert json.loads((folder / "best.json").read_text())["step"] == 6
    exported = load_file(folder / "final/model.safetensors")
    last = load_file(folder / "checkpoints/step-00000006/model.safetensors")
    assert all(torch.equal(exported[name], last[name]) for name in exported)


def test_a_run_ends_when_patience_is_spent_and_a_resumed_one_counts_on(tmp_path, fake_evaluations, monkeypatch):
    fake_evaluations(LOSSES)
    result = run(config(tmp_path, early_stopping_patience=2, save_steps=1, save_total_limit=9))
    assert result.steps == 4  # 3.0 behind step 2, then 3.5 and 3.6
    assert steps(result.folder)[-1] == 4
    fake_evaluations(LOSSES)  # none is asked for
    assert run(config(tmp_path, early_stopping_patience=2, save_steps=1, save_total_limit=9), resume=True).steps == 4
    for late in (3, 4):
        (checkpoint,) = (path for path in checkpoints(result.folder) if path.name.endswith(str(late)))
        checkpoint.rename(tmp_path / checkpoint.name)
    fake_evaluations(LOSSES, start=3)
    again = run(config(tmp_path, early_stopping_patience=2, save_steps=1, save_total_limit=9), resume=True)
    assert again.steps == 4


def test_a_run_without_patience_makes_all_steps(tmp_path, fake_evaluations):
    fake_evaluations(LOSSES)
    assert run(config(tmp_path)).steps == 6
    assert not (tmp_path / "run/best.json").exists()


def test_first_evaluation_and_first_save_are_as_asked(tmp_path, fake_evaluations):
    fake_evaluations(LOSSES[1:])
    result = run(config(tmp_path, eval_first=False, save_first=True))
    assert [values["step"] for values in result.evals] == [1, 2, 3, 4, 5, 6]
    assert steps(result.folder) == [0, 6]


def test_shares_and_epochs(tmp_path):
    """9 of 12 rows are trained on, one a step: an epoch ends at steps 10 and 20 of 25."""
    asked = config(tmp_path, max_steps=None, num_train_epochs=2.5, eval_steps="epoch", save_steps=0.4)
    result = run(asked.model_copy(update={"training": asked.training.model_copy(update={"save_total_limit": 9})}))
    epoch = result.steps / 2.5
    assert [values["step"] for values in result.evals] == [0, epoch, 2 * epoch, result.steps]
    share = -(-result.steps * 2 // 5)
    assert steps(result.folder) == sorted({share, 2 * share, result.steps})


@pytest.mark.parametrize(
    ("interval", "total", "steps"), [(3, 10, 3), (0.25, 10, 3), (0.01, 10, 1), ("epoch", 10, None)]
)
def test_an_interval_in_steps(interval, total, steps):
    assert steps_between(interval, total) == steps
    assert steps_between(None, total) is None


def test_an_epoch_is_due_once_also_where_its_quotient_falls_short():
    ends = [step for step in range(1, 50) if is_due("epoch", step, 49, ((step - 1) / 49 * 7, step / 49 * 7))]
    assert ends == [7, 14, 21, 28, 35, 42, 49]


def test_nan_is_never_the_best_and_more_accuracy_is():
    best = Best.of(TrainingParams(best_metric="accuracy"), None)
    assert [best.take(step, {"accuracy": value}) for step, value in enumerate([float("nan"), 0.5, 0.4, 0.6], 1)] == [
        *(False, True, False, True)
    ]
    lower = Best.of(TrainingParams(), best.to_json())
    assert lower.step is None  # of another metric
    with pytest.raises(RequestError, match="no eval_loss"):
        lower.take(1, {"accuracy": 1.0})


def test_what_cannot_be_compared_is_refused(tmp_path):
    def keys(**training):
        return [conflict.keys[0] for conflict in best_conflicts(config(tmp_path, **training))]

    assert "training.best_metric" in keys(best_metric="accuracy")
    assert "training.best_metric" in keys(best_metric="eval_loss", eval_steps=None)
    assert "training.early_stopping_patience" in keys(early_stopping_patience=2, eval_steps=None)
    assert "training.export_best" in keys(export_best=True)
    assert keys(best_metric="perplexity", export_best=True) == keys()

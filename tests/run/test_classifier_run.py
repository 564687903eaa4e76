"""A classifier's run is like any other: stopped and resumed bit for bit, its memory reported, its export plain."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from framework.compose import load
from framework.errors import Interrupted, RequestError
from framework.run import trainer
from framework.run.checkpoints.checkpoint import checkpoints
from framework.schema.config import TrainingConfig
from tests.run.test_trainer import interrupt_after, metrics
from tests.tiny import BERT

CLASSES = ["fruit", "sky", "lawn"]
TEXTS = ["a red apple", "the blue sky is wide", "green grass of the lawn"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = [{"text": f"{TEXTS[at % 3]} {at}", "label": CLASSES[at % 3]} for at in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def config(rows: Path, folder: Path, data: dict[str, Any] | None = None, **training: Any) -> TrainingConfig:
    shape = {key: value for key, value in BERT.items() if key != "vocab_size"}
    return TrainingConfig.model_validate(
        {
            "training": {
                "task": "classification",
                "max_steps": 12,
                "per_device_train_batch_size": 2,
                "global_batch_size": 4,
                "learning_rate": 1e-2,
                "output_dir": str(folder),
                **training,
            },
            "model": {
                "architecture": {**shape, "hidden_dropout_prob": 0.1},
                "load_pretrained_weights": False,
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "model_max_length": 32,
            },
            "data": {"train": [{"path": str(rows)}], "eval_fraction": 0.1, **(data or {})},
        }
    )


def train(made: TrainingConfig, **options: Any) -> trainer.RunResult:
    return trainer.train(made, **{"planner": None, "quiet": True, **options})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = AutoModelForSequenceClassification.from_pretrained(folder / "final").state_dict()
    return found


@pytest.fixture(scope="module")
def straight(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(config(rows, folder))
    return folder


@pytest.mark.parametrize("step", [3, 9])
def test_stopped_and_resumed_it_is_the_same_run(
    rows: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(step, patched)
        with pytest.raises(Interrupted, match=f"after step {step}"):
            train(config(rows, tmp_path / "run"))
    train(config(rows, tmp_path / "run"), resume=True)
    assert metrics(tmp_path / "run") == metrics(straight)
    found, expected = weights(tmp_path / "run"), weights(straight)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_edited_rows_are_not_resumed_with(rows: Path, tmp_path: Path) -> None:
    own = tmp_path / "rows.jsonl"
    own.write_text(rows.read_text())
    train(config(own, tmp_path / "run", max_steps=2))
    lines = [json.loads(line) for line in own.read_text().splitlines()]
    swapped = dict(zip(CLASSES, [*list(CLASSES)[1:], *list(CLASSES)[:1]], strict=True))
    edits = {
        "data.train": [{**line, "label": swapped[line["label"]]} for line in lines],
        "model.tokenizer": [{**line, "text": line["text"].upper()} for line in lines],
    }
    for key, edited in edits.items():
        own.write_text("".join(json.dumps(line) + "\n" for line in edited))
        with pytest.raises(RequestError) as caught:
            train(config(own, tmp_path / "run", max_steps=2), resume=True)
        assert key in [problem.key for problem in caught.value.problems]
        assert f"--allow {key}" in str(caught.value)
    train(config(own, tmp_path / "run", max_steps=2), resume=True, allow=["data.train", "model.tokenizer"])


def test_what_the_run_leaves_behind(straight: Path) -> None:
    """The classes are in both configs, in their order; metrics count rows; the config trains again as it is."""
    assert len(checkpoints(straight)) == 1
    names = sorted(CLASSES)
    written = load(str(straight / "config.yaml"))
    assert (written.data.labels, written.data.multi_label) == (tuple(names), False)
    exported = json.loads((straight / "final" / "config.json").read_text())
    assert exported["id2label"] == {str(index): name for index, name in enumerate(names)}
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines if "loss" in line] == [4] * 12
    evaluated = [line for line in lines if "eval_loss" in line]
    assert all(set(line) == {"step", "eval_loss", "accuracy", "macro_f1"} for line in evaluated)


def test_the_split_into_micro_batches_does_not_change_the_trained_weights(rows: Path, tmp_path: Path) -> None:
    made = [config(rows, tmp_path / str(size), per_device_train_batch_size=size, max_steps=4) for size in (4, 1)]
    for one in made:
        shape = {**(one.model.architecture or {}), "hidden_dropout_prob": 0.0}
        model = one.model.model_dump() | {"architecture": shape}
        train(TrainingConfig.model_validate(one.model_dump() | {"model": model}))
    assert metrics(tmp_path / "1") == pytest.approx(metrics(tmp_path / "4"), rel=1e-4)


@pytest.mark.parametrize(
    ("data", "key", "word"),
    [
        ({"labels": ["fruit", "sky"]}, "data.train", "lawn"),
        ({"multi_label": True}, "data.multi_label", "one class"),
    ],
)
def test_labels_that_contradict_the_recipe_are_refused(
    rows: Path, tmp_path: Path, data: dict[str, Any], key: str, word: str
) -> None:
    with pytest.raises(RequestError, match=word) as error:
        train(config(rows, tmp_path / "run", data))
    assert error.value.problems[0].key.startswith(key)


def test_rows_of_one_class_are_nothing_to_learn(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {at}", "label": "only"}) + "\n" for at in range(8)))
    with pytest.raises(RequestError, match="nothing to tell apart"):
        train(config(file, tmp_path / "run"))


def test_the_plan_of_a_run_has_the_head_of_its_classes(rows: Path, tmp_path: Path) -> None:
    planned: list[TrainingConfig] = []

    def look(asked: TrainingConfig) -> Any:
        planned.append(asked)
        raise RequestError([])

    with pytest.raises(RequestError):
        train(config(rows, tmp_path / "run"), planner=look)
    assert planned[0].data.labels == tuple(sorted(CLASSES))

"""`evaluate`: the same metrics as the run's own evaluation, of files and sets; and lm-eval with a stand-in."""

import json
import math
import sys
import types

import pytest

from framework.cli import main
from framework.errors import RequestError
from framework.run.checkpoints.merge import merge_run
from framework.run.evaluate_saved import evaluate_saved, evaluate_tasks
from tests.run.test_trainer import config, corpus, train  # noqa: F401
from tests.tiny import LLAMA


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    file = tmp_path_factory.mktemp("held") / "held.jsonl"
    file.write_text("".join(json.dumps({"text": f"def f{n}(x): return x * {n}"}) + "\n" for n in range(5)))
    return file


def own_numbers(run):
    return {name: value for name, value in run.evals[-1].items() if name != "step"}


@pytest.mark.parametrize(
    ("training", "data", "architecture"),
    [
        ({}, {}, "gpt2"),
        ({}, {"packing": True}, "llama"),
        ({"use_peft": True, "per_device_eval_batch_size": 1}, {}, "llama"),
    ],
    ids=["plain", "packed", "adapter"],
)
def test_the_numbers_are_those_of_the_run(corpus, tmp_path, training, data, architecture):  # noqa: F811
    shape = {} if architecture == "gpt2" else {"architecture": LLAMA}
    run = train(config(corpus, tmp_path / "run", training={"max_steps": 2, **training}, data=data, **shape))
    found = evaluate_saved(run.folder)
    assert found.metrics == pytest.approx(own_numbers(run), rel=1e-5)
    assert (found.rows, found.unit) == (38, "supervised tokens")  # of 2 documents, also where packs held them
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.metrics["eval_loss"]), rel=1e-6)


def test_sets_files_and_what_was_merged(corpus, held_out, tmp_path):  # noqa: F811
    eval_rows = [{"path": str(held_out), "eval_set": "code"}, {"path": str(corpus), "eval_set": "text"}]
    training = {"max_steps": 2, "use_peft": True}
    data = {"eval": eval_rows, "eval_fraction": 0.0}
    run = train(config(corpus, tmp_path / "run", training=training, data=data, architecture=LLAMA))
    own = own_numbers(run)
    assert evaluate_saved(run.folder).metrics == pytest.approx(own, rel=1e-5)
    alone = evaluate_saved(run.folder, str(held_out))
    assert alone.metrics["eval_loss"] == pytest.approx(own["eval_loss/code"], rel=1e-5)
    assert alone.rows == 5
    merged = merge_run(run.folder).folder
    assert evaluate_saved(merged, str(held_out)).metrics["eval_loss"] == pytest.approx(own["eval_loss/code"], rel=1e-4)


def test_classes_are_those_of_the_run(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"{word} number {n}", "label": word} for n in range(10) for word in ("a", "b")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"task": "classification", "max_steps": 3}
    run = train(config(file, tmp_path / "run", training=training, architecture={**LLAMA, "pad_token_id": 0}))
    found = evaluate_saved(run.folder)
    assert found.metrics == pytest.approx(own_numbers(run), rel=1e-5)
    only_a = tmp_path / "a.jsonl"
    only_a.write_text(json.dumps(rows[0]) + "\n")
    assert evaluate_saved(run.folder, str(only_a)).rows == 1


def test_what_cannot_be_evaluated_is_reported(corpus, held_out, tmp_path):  # noqa: F811
    made = config(corpus, tmp_path / "run", training={"max_steps": 1}, data={"eval_fraction": 0.0})
    train(made)
    with pytest.raises(RequestError, match="has held out no rows"):
        evaluate_saved(tmp_path / "run")
    (tmp_path / "run" / "final").rename(tmp_path / "alone")
    with pytest.raises(RequestError, match="is not the export of a run"):
        evaluate_saved(tmp_path / "alone")
    assert evaluate_saved(tmp_path / "alone", str(held_out)).rows == 5


def test_the_command(corpus, tmp_path, capsys):  # noqa: F811
    run = train(config(corpus, tmp_path / "run", training={"max_steps": 1}))
    assert main(["evaluate", str(run.folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"]["eval_loss"] == pytest.approx(run.evals[-1]["eval_loss"], rel=1e-5)
    assert document["rows"] == 38
    assert 38 < document["supervised_tokens"] <= 38 * 31  # of 32 tokens the first is not predicted
    assert main(["evaluate", str(run.folder), str(corpus), "--tasks", "arc"]) == 2
    assert main(["evaluate", str(run.folder), "--limit", "3"]) == 2


def test_lm_eval_is_named_with_its_command_where_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RequestError, match=r"(?s)lm-eval is not installed.*pip install lm-eval"):
        evaluate_tasks(tmp_path, ["arc_easy"], None)


def test_tasks_are_asked_of_the_model_that_was_trained(corpus, tmp_path, monkeypatch):  # noqa: F811
    run = train(config(corpus, tmp_path / "run", training={"max_steps": 1, "use_peft": True}, architecture=LLAMA))
    asked = {}

    def simple_evaluate(**values):
        asked.update(values)
        return {"results": {task: {"acc,none": 0.5, "alias": task} for task in values["tasks"]}}

    package = types.ModuleType("lm_eval")
    package.simple_evaluate = simple_evaluate
    for name, contents in {
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda **values: values},
        "lm_eval.tasks": {"TaskManager": lambda: types.SimpleNamespace(all_tasks=["arc_easy", "hellaswag"])},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    found = evaluate_tasks(run.folder, ["arc_easy"], 7)
    assert found == {"arc_easy": {"acc,none": 0.5, "alias": "arc_easy"}}
    assert asked["limit"] == 7
    assert type(asked["model"]["pretrained"]).__name__.startswith("PeftModel")
    with pytest.raises(RequestError, match=r"(?s)lm-eval has no task hellaswg.*hellaswag"):
        evaluate_tasks(run.folder, ["hellaswg"], None)

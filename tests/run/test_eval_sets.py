"""Named sets of held-out rows, and metrics from Python: their values, their use, and refused requests."""

import json

import numpy as np
import pytest
import torch

from framework.build.data import row_cache
from framework.build.data.mixing import find_sets, pack_sets
from framework.build.from_python import FromPython
from framework.compose.request import draft
from framework.errors import RequestError
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.evaluate import format_losses
from framework.schema.data import DatasetParams
from framework.schema.rules.evaluation import best_conflicts, eval_set_conflicts
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401

TEXTS = {"code": "def f(x): return x", "talk": "hello there, how are you doing", "odd": "zzz qqq"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each name, of 3, 4 and 5 rows."""
    folder = tmp_path_factory.mktemp("sets")
    for count, (name, text) in enumerate(TEXTS.items(), 3):
        rows = [{"text": f"{text} {number}"} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in TEXTS}


def sets(files, **named):
    """Sources as a config has them; `code=["code", "odd"]` is a set of two files."""
    return [{"path": files[name], "eval_set": own} for own, names in named.items() for name in names]


def evaluated(corpus, folder, sources, data=None, **training):  # noqa: F811
    asked = config(
        corpus,
        folder,
        training={"max_steps": 1, "per_device_eval_batch_size": 2, **training},
        data={"eval": sources, "eval_fraction": 0.0, **(data or {})},
    )
    return train(asked)


def test_each_set_has_the_numbers_that_it_has_alone(corpus, files, tmp_path):  # noqa: F811
    run = evaluated(corpus, tmp_path / "sets", sets(files, code=["code", "odd"], talk=["talk"]))
    for name, own in {"code": ["code", "odd"], "talk": ["talk"]}.items():
        alone = evaluated(corpus, tmp_path / name, [{"path": files[each]} for each in own]).evals
        for step, values in enumerate(run.evals):
            for metric in ("eval_loss", "perplexity", "token_accuracy"):
                assert values[f"{metric}/{name}"] == pytest.approx(alone[step][metric], rel=1e-12)
    joined = evaluated(corpus, tmp_path / "joined", [{"path": file} for file in files.values()]).evals
    assert [values["eval_loss"] for values in run.evals] == pytest.approx([v["eval_loss"] for v in joined], rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "sets" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_loss/talk"] for line in lines if "eval_loss" in line] == [v["eval_loss/talk"] for v in run.evals]


def test_a_pack_holds_rows_of_one_set(corpus, files, tmp_path):  # noqa: F811
    """With the same weights, packed rows have the loss of unpacked ones."""
    sources = sets(files, code=["code"], talk=["talk"])
    plain = evaluated(corpus, tmp_path / "plain", sources).evals[0]
    packed = evaluated(corpus, tmp_path / "packed", sources, {"packing": True}).evals[0]
    for name in ("eval_loss", "eval_loss/code", "eval_loss/talk"):
        assert packed[name] == pytest.approx(plain[name], rel=1e-5)


class FewRows:
    """Rows of these lengths, as far as packing looks at them."""

    lengths = np.array([3, 3, 4, 2, 2, 6])

    def __len__(self):
        return len(self.lengths)


def test_packs_of_sets_are_numbered_one_set_after_the_other():
    rows = FewRows()
    packs, found = pack_sets(rows, {"a": range(3), "b": range(3, 6)}, limit=6, seed=0)
    assert {
        name: sorted(row for pack in numbers for row in packs.rows_of(pack)) for name, numbers in found.items()
    } == {
        "a": [0, 1, 2],
        "b": [3, 4, 5],
    }
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(len(packs)))
    assert all(rows.lengths[packs.rows_of(pack)].sum() <= 6 for pack in range(len(packs)))


def test_a_set_without_a_row_is_named():
    sources = tuple(DatasetParams(path=f"{name}.jsonl", eval_set=name) for name in ("a", "b", "b"))
    assert find_sets(sources, (2, 1, 3)) == {"a": range(2), "b": range(2, 6)}
    with pytest.raises(RequestError, match=r"data\.eval\[2\]: no row of the set b is left"):
        find_sets(sources, (2, 0, 0))


def test_sets_come_from_the_cache_of_rows_too(corpus, files, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(row_cache, "LEAST_SECONDS", 0.0)
    sources = sets(files, code=["code"], talk=["talk"])
    first, second = (evaluated(corpus, tmp_path / name, sources).evals for name in ("first", "second"))
    assert first == second
    assert "eval_loss/talk" in second[0]


def test_the_best_may_be_of_one_set(corpus, files, tmp_path):  # noqa: F811
    sources = sets(files, code=["code"], talk=["talk"])
    run = evaluated(corpus, tmp_path / "run", sources, max_steps=3, eval_steps=1, best_metric="eval_loss/talk")
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    losses = {values["step"]: values["eval_loss/talk"] for values in run.evals if values["step"]}
    assert (best["metric"], best["step"]) == ("eval_loss/talk", min(losses, key=losses.__getitem__))


def test_a_mapping_of_names_is_a_list_with_their_places(write):
    recipe = write(
        "training: {task: pretrain}\ndata:\n  eval:\n    code:\n      - path: a.jsonl\n"
        "      - path: b.jsonl\n        nmae: x\n    chat: [{path: c.jsonl, split: 3}]\n"
    )
    report = draft(recipe)
    problems = {problem.key: problem.where for problem in report.problems}
    assert problems == {"data.eval[1].nmae": "r.yaml:7", "data.eval[2].split": "r.yaml:8"}
    fine = write("data:\n  eval: {code: [{path: ./a.jsonl}], chat: [{path: ./c.jsonl}]}\n")
    assert [source.eval_set for source in draft(fine).config.data.eval] == ["code", "chat"]


def test_names_are_of_all_sources_and_those_of_a_set_next_to_each_other(corpus, files, tmp_path):  # noqa: F811
    def keys(*names, train=None):
        sources = [{"path": "a.jsonl", "eval_set": name} for name in names]
        data = {"eval": sources, "train": [{"path": "a.jsonl", "eval_set": train}]}
        return [each.keys[0] for each in eval_set_conflicts(config(corpus, tmp_path, data=data))]

    assert keys("a", "a", "b") == keys(None, None) == keys() == []
    assert keys("a", None) == ["data.eval[1].eval_set"]
    assert keys("a", "b", "a") == ["data.eval"]
    assert keys(train="a") == ["data.train[0].eval_set"]
    asked = config(
        corpus,
        tmp_path,
        training={"best_metric": "eval_loss/b", "eval_steps": 1},
        data={"eval": sets(files, a=["odd"])},
    )
    assert [each.expected for each in best_conflicts(asked)] == ["eval_loss/a"]


def test_the_line_of_an_evaluation_names_sets():
    values = {
        "eval_loss": 1.0,
        "token_accuracy": 0.5,
        "eval_loss/code": 2.0,
        "token_accuracy/code": 0.1,
        "python/f": 3.0,
    }
    assert format_losses(values) == "eval loss 1.0000  token accuracy 0.5000  code 2.0000  f 3.0000"


# -- metrics from Python


def test_a_metric_from_python_is_logged_and_may_be_the_best(corpus, tmp_path):  # noqa: F811
    seen = []

    def norm(model, tokenizer):
        torch.rand(3)  # training draws what it would without
        seen.append((model.training, torch.is_grad_enabled(), len(tokenizer) > 100))
        return -float(sum(weight.norm() for weight in model.parameters()))

    steps = {"max_steps": 3, "eval_steps": 1, "best_metric": "python/norm", "save_total_limit": 1}
    run = train(config(corpus, tmp_path / "run", training=steps), from_python=FromPython(metrics={"norm": norm}))
    train(config(corpus, tmp_path / "plain", training={**steps, "best_metric": None}))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert set(seen) == {(False, False, True)}
    values = {line["step"]: line["python/norm"] for line in run.evals}
    assert metrics(tmp_path / "run", "python/norm") == values
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    after_first = {step: value for step, value in values.items() if step}
    assert best["step"] == max(after_first, key=after_first.__getitem__)  # more is better


def test_one_that_raises_loses_no_work(corpus, tmp_path):  # noqa: F811
    calls = []

    def fails(model, tokenizer):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no such thing")
        return 1.0

    steps = {"max_steps": 6, "eval_steps": 2, "best_metric": "python/fails"}
    made = config(corpus, tmp_path / "run", training=steps)
    with pytest.raises(ValueError, match="no such thing") as raised:
        train(made, from_python=FromPython(metrics={"fails": fails}))
    assert "continue with --resume" in raised.value.__notes__[0]
    assert checkpoints(tmp_path / "run")


def test_a_best_metric_from_python_that_is_not_given_is_refused_at_once(corpus, tmp_path):  # noqa: F811
    made = config(corpus, tmp_path / "run", training={"eval_steps": 1, "best_metric": "python/rouge"})
    with pytest.raises(RequestError, match=r"training\.best_metric: is a metric from Python, and other is given"):
        train(made, from_python=FromPython(metrics={"other": len}))

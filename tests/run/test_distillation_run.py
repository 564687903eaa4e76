"""Distillation from file to export: a small model learns from a larger one that was trained on the same text."""

import json
from pathlib import Path

import pytest

from framework.errors import Interrupted, RequestError
from framework.memory.cards import read_card
from framework.run import trainer
from framework.run.checkpoint import checkpoints
from framework.run.rehearse import rehearse
from tests.run.test_trainer import config as pretrain_config
from tests.run.test_trainer import final_weights, interrupt_after, metrics, same, train
from tests.tiny import LLAMA, tiny_config

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Lines of a standard library module."""
    lines = [line.strip() for line in Path(json.__file__).with_name("decoder.py").read_text().splitlines()]
    file = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": line[:40]}) + "\n" for line in lines if len(line) > 20))
    return file


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(pretrain_config(corpus, folder, architecture=WIDE, training={"max_steps": 60}))
    return folder / "final"


def config(corpus, folder, teacher, teaching=None, asks_for=None, **training):
    training = {
        "task": "distillation",
        "teacher": {"model_name": str(teacher), **(teaching or {})},
        "max_steps": 12,
        "learning_rate": 1e-2,
        **training,
    }
    asked = pretrain_config(corpus, folder, architecture=LLAMA, training=training)
    model = {"tokenizer": None, "tokenizer_name": str(teacher)} if asks_for is None else asks_for
    model = {**asked.model.model_dump(), "architecture": {**LLAMA, "vocab_size": 300}, **model}
    return asked.model_copy(update={"model": type(asked.model)(**model)})


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_student_comes_closer_to_the_teacher(corpus, tmp_path, teacher, divergence, capfd):
    asked = config(corpus, tmp_path / "run", teacher, distillation={"divergence": divergence, "alpha": 1.0})
    result = train(asked, quiet=False)
    first, last = result.evals[0], result.evals[-1]
    assert last["divergence"] < 0.5 * first["divergence"]
    assert last["token_accuracy"] > first["token_accuracy"]
    assert "training.teacher" in (said := capfd.readouterr().err)
    assert "a frozen model" in said


def test_a_resumed_run_is_the_straight_one(corpus, tmp_path, teacher, monkeypatch):
    train(config(corpus, tmp_path / "straight", teacher))
    with monkeypatch.context() as patched:
        interrupt_after(5, patched)
        with pytest.raises(Interrupted):
            train(config(corpus, tmp_path / "run", teacher))
    stored = json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert stored["reference"] is not None
    train(config(corpus, tmp_path / "run", teacher), resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_the_export_is_the_student(corpus, tmp_path, teacher):
    train(config(corpus, tmp_path / "run", teacher, max_steps=1))
    assert final_weights(tmp_path / "run")["lm_head.weight"].shape == (300, LLAMA["hidden_size"])


def test_another_tokenizer_is_refused(corpus, tmp_path, teacher):
    words = tmp_path / "other.jsonl"
    words.write_text("".join(json.dumps({"text": f"zyx wvu {n} tsrq ponm"}) + "\n" for n in range(200)))
    asked = config(words, tmp_path / "run", teacher, asks_for={})
    with pytest.raises(RequestError, match="the teacher's tokenizer is not the one of the rows"):
        train(asked)


def planned(**sections):
    wide = {**LLAMA, "vocab_size": 8192, "hidden_size": 64}
    large = {**wide, "hidden_size": 128, "dtype": "bfloat16"}
    training = {"task": "distillation", "teacher": {"architecture": large, **sections.pop("teacher", {})}}
    training |= {"per_device_train_batch_size": 4, "global_batch_size": 8}
    model = {"model_max_length": 64, "torch_dtype_str": "float32", **sections.pop("model", {})}
    return rehearse(tiny_config(wide, training=training, model=model, gpu=read_card("h100_80gb"), **sections))


def terms(plan, phase):
    return next(item.terms for item in plan.phases if item.name == phase)


def test_the_teacher_is_in_the_plan_in_its_own_dtype():
    as_stored, wider = planned(), planned(teacher={"torch_dtype_str": "float32"})
    own = 4 * as_stored.total_parameters
    halves = terms(as_stored, "load").weights - own
    assert terms(wider, "load").weights - own == pytest.approx(2 * halves, rel=0.02)
    assert as_stored.checkpoint_bytes == pytest.approx(3 * own, rel=0.01), "nothing of it is saved"


def test_chunks_leave_neither_models_logits_whole():
    whole, chunked = (
        planned(data={"eval_fraction": 0.1}),
        planned(model={"chunked_loss": 32}, data={"eval_fraction": 0.1}),
    )
    logits = 4 * 4 * 64 * 8192  # one model's, in float32
    for phase in ("loss", "backward", "eval"):
        assert terms(whole, phase).logits_and_loss > 4 * logits, phase
        assert terms(chunked, phase).logits_and_loss < 0.3 * terms(whole, phase).logits_and_loss, phase

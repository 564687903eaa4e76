"""Distillation from file to export: a small model learns from a larger one that was trained on the same text."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from framework.errors import Interrupted, RequestError
from framework.memory.cards import read_card
from framework.memory.requirements import unmet_requirements
from framework.run import trainer
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.planning.measure import synthetic_batches
from framework.run.rehearsal.footprint import held_tensors, state_tensors
from framework.run.rehearsal.rehearse import rehearse
from framework.run.step import train_step
from tests.grids import first
from tests.run.cpu_memory import peak_bytes
from tests.run.test_trainer import config as pretrain_config
from tests.run.test_trainer import final_weights, interrupt_after, metrics, same, train
from tests.tiny import LLAMA, tiny_assembly, tiny_config

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


@pytest.mark.slow
@pytest.mark.parametrize("divergence", first(1, ["forward_kl", "reverse_kl", "jsd"]))
def test_the_student_comes_closer_to_the_teacher(corpus, tmp_path, teacher, divergence, capfd):
    asked = config(corpus, tmp_path / "run", teacher, distillation={"divergence": divergence, "alpha": 1.0})
    result = train(asked, quiet=False)
    first, last = result.evals[0], result.evals[-1]
    assert last["divergence"] < 0.5 * first["divergence"]
    assert last["token_accuracy"] > first["token_accuracy"]
    assert "training.teacher" in (output := capfd.readouterr().err)
    assert "a frozen model" in output


def test_a_resumed_run_is_the_straight_one(corpus, tmp_path, teacher, monkeypatch):
    train(config(corpus, tmp_path / "straight", teacher, max_steps=6))
    with monkeypatch.context() as patched:
        interrupt_after(4, patched)
        with pytest.raises(Interrupted):
            train(config(corpus, tmp_path / "run", teacher, max_steps=6))
    stored = json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert stored["reference"] is not None
    train(config(corpus, tmp_path / "run", teacher, max_steps=6), resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_the_export_is_the_student(corpus, tmp_path, teacher):
    train(config(corpus, tmp_path / "run", teacher, max_steps=1))
    assert final_weights(tmp_path / "run")["lm_head.weight"].shape == (300, LLAMA["hidden_size"])


def test_another_tokenizer_is_refused(corpus, tmp_path, teacher):
    rows = tmp_path / "other.jsonl"
    rows.write_text("".join(json.dumps({"text": f"zyx wvu {n} tsrq ponm"}) + "\n" for n in range(200)))
    asked = config(rows, tmp_path / "run", teacher, asks_for={})
    with pytest.raises(RequestError, match="the teacher's tokenizer differs from the student's"):
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


@pytest.mark.parametrize(("bits", "kind"), first(1, [(4, "4-bit nf4"), (8, "8-bit")]))
def test_a_packed_teacher_teaches_is_read_back_and_stays_as_it_was(corpus, tmp_path, teacher, bits, kind, capfd):
    pytest.importorskip("bitsandbytes")
    asked = config(corpus, tmp_path / "run", teacher, {"bits": bits}, distillation={"alpha": 1.0})
    result = train(asked, quiet=False)
    assert result.evals[-1]["divergence"] < 0.5 * result.evals[0]["divergence"]
    output = capfd.readouterr().err
    (line,) = (line for line in output.splitlines() if line.startswith("training.teacher.bits"))
    assert line.split(maxsplit=1)[1].startswith(kind)
    assert "14 linear layers of the teacher" in line
    monkeyed = config(corpus, tmp_path / "run", teacher, max_steps=14, distillation={"alpha": 1.0})
    with pytest.raises(RequestError, match="teacher"):
        train(monkeyed, resume=True)


def test_what_a_packed_teacher_says_is_near_to_what_it_says_whole(teacher):
    pytest.importorskip("bitsandbytes")
    ids, logits = torch.arange(3, 35).reshape(2, 16), {}
    for bits in (None, 8, 4):
        wide = {**LLAMA, "vocab_size": 300}
        training = {"task": "distillation", "teacher": {"model_name": str(teacher), "bits": bits}}
        assembly = tiny_assembly(tiny_config(wide, training=training, model={"torch_dtype_str": "float32"}))
        with torch.no_grad():
            logits[bits] = assembly.frozen_model(input_ids=ids).logits.log_softmax(-1)
    apart = {bits: float((logits[bits] - logits[None]).abs().mean()) for bits in (8, 4)}
    assert 0 < apart[8] < apart[4] < 0.5


def test_the_plan_of_a_packed_teacher_holds_what_its_layers_take():
    """Linear layers of 2 blocks: q and o 128 x 128, k and v 128 x 64, three of 128 x 64; a scale for 64 weights, or for
    a row of 8 bits."""
    pytest.importorskip("bitsandbytes")
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 64 * 128)
    outputs = 2 * (128 + 64 + 64 + 128 + 64 + 64 + 128)
    plain = planned()
    whole = terms(plain, "load").weights
    for bits, size in ((4, weights / 2 + weights / 64 * 4 + 14 * 64), (8, weights + 4 * outputs)):
        found = planned(teacher={"bits": bits})
        saved = whole - terms(found, "load").weights
        assert saved == pytest.approx(2 * weights - size, abs=16 * 512), bits
        assert found.step_peak.allocated_bytes < plain.step_peak.allocated_bytes


@pytest.mark.parametrize("bits", first(2, [None, 4, 8]))
def test_the_plan_of_a_packed_teacher_is_what_the_step_takes(bits):
    pytest.importorskip("bitsandbytes")
    wide = {**LLAMA, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512}
    large = {**wide, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    teaching = {"architecture": large, "load_pretrained_weights": False, "bits": bits}
    training = {"task": "distillation", "teacher": teaching, "mixed_precision_dtype": "none"}
    model = {"model_max_length": 64, "torch_dtype_str": "float32"}
    asked = tiny_config(wide, training=training, model=model, gpu=read_card("cpu"))
    plan, assembly = rehearse(asked), tiny_assembly(asked)
    batches = synthetic_batches(assembly)
    train_step(assembly, batches, 1)  # makes the optimizer's states
    held = [*held_tensors(assembly), *state_tensors(assembly)]
    before = sum(tensor.numel() * tensor.element_size() for tensor in held)
    taken = before + peak_bytes(lambda: train_step(assembly, batches, 2))
    assert plan.step_peak.allocated_bytes == pytest.approx(taken, rel=0.03)


def test_a_teacher_that_is_stored_packed_is_refused_with_what_works(corpus, tmp_path, teacher):
    stored = tmp_path / "packed"
    shutil.copytree(teacher, stored)
    settings = json.loads((stored / "config.json").read_text())
    packing = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (stored / "config.json").write_text(json.dumps({**settings, "quantization_config": packing}))
    with pytest.raises(RequestError, match="stored quantized") as refused:
        train(config(corpus, tmp_path / "run", stored))
    assert "training.teacher.bits=4" in refused.value.problems[0].expected


def test_bits_without_the_package_are_refused(monkeypatch):
    monkeypatch.setattr("framework.memory.requirements.is_installed", lambda package: False)
    asked = tiny_config(training={"task": "distillation", "teacher": {"architecture": LLAMA, "bits": 4}})
    (found,) = unmet_requirements(asked, runs_here=True)
    assert found.keys == ("training.teacher.bits",)
    assert "pip install bitsandbytes, or unset" in found.expected

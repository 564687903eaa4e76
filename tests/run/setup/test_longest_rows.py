"""The longest rows before the first step."""

import json

import pytest
import torch

from framework.build.place import real_place
from framework.errors import OutOfMemory
from framework.memory.explain import explain
from framework.memory.planning import make_plan
from framework.run.inputs import read_inputs
from framework.run.record.meter import Meter
from framework.run.rehearsal.rehearse import record
from framework.run.setup import first_passes as trial
from framework.run.setup.first_passes import PIECE, planned_states, stand_in
from framework.run.step import train_step, trial_step
from tests.run.oom.test_retry import MESSAGE, MICRO, run
from tests.run.test_trainer import config, corpus, final_weights, metrics, same  # noqa: F401
from tests.tiny import split, tiny_assembly, tiny_config, unequal_rows


@pytest.fixture
def tried(monkeypatch):
    """The shapes that were tried; those with more rows than `tried.most` run out of memory in backward."""

    class Tried(list):
        most = 100

    found = Tried()

    def trial_of(assembly, made, observe):
        found.append(["train", *made[0]["input_ids"].shape, len(made)])

        def watch(phase):
            observe(phase)
            if phase == "backward" and len(made[0]["input_ids"]) > found.most:
                raise torch.OutOfMemoryError(MESSAGE)

        trial_step(assembly, made, watch)

    def evaluation_of(assembly, batches, observe):
        found.append(["eval", *batches[0]["input_ids"].shape])
        return original(assembly, batches, observe)

    original = trial.evaluate
    monkeypatch.setattr(trial, "trial_step", trial_of)
    monkeypatch.setattr(trial, "evaluate", evaluation_of)
    return found


@pytest.mark.slow
def test_the_longest_rows_are_tried_first_and_change_nothing(corpus, tmp_path, tried):  # noqa: F811
    """With dropout, the same losses and weights as a run without a trial."""
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": None}
    run(corpus, tmp_path / "plain", training={**sizes, "on_oom": "stop"})
    assert not tried, "on the cpu only a run that may shrink makes the trial"
    run(corpus, tmp_path / "run", training=sizes)
    data = read_inputs(config(corpus, tmp_path / "unused")).data
    longest = {"train": sorted(data.train.lengths)[-1], "eval": sorted(data.eval.lengths)[-1]}
    assert tried == [["eval", 2, longest["eval"]], ["train", 2, longest["train"], 2]]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert metrics(tmp_path / "run", "eval_loss") == metrics(tmp_path / "plain", "eval_loss")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "plain"))


@pytest.mark.slow
def test_what_does_not_fit_is_halved_before_the_first_step(corpus, tmp_path, tried):  # noqa: F811
    tried.most = 1
    run(corpus, tmp_path / "run")
    assert [shape[1] for shape in tried if shape[0] == "train"] == [4, 2, 1]
    run(corpus, tmp_path / "one", training={"per_device_train_batch_size": 1})
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "one"))
    repairs = json.loads((tmp_path / "run" / "memory.json").read_text())["repairs"]
    assert repairs == [
        {"key": MICRO, "before": 4, "after": 2, "step": 0, "phase": "backward"},
        {"key": MICRO, "before": 2, "after": 1, "step": 0, "phase": "backward"},
    ]
    assert [repair.to_json() for repair in explain(tmp_path / "run").circumstances.repairs] == repairs


def test_a_row_that_does_not_fit_alone_ends_the_run_in_its_first_minute(corpus, tmp_path, tried):  # noqa: F811
    tried.most = 0
    with pytest.raises(OutOfMemory) as raised:
        run(corpus, tmp_path / "run")
    message = str(raised.value)
    assert message.startswith("out of memory in backward: ")
    assert "nothing is left to halve: the micro-batch is 1 row (the longest row, 32 tokens)" in message
    assert "no step was made: there is nothing to save" in message
    assert not metrics(tmp_path / "run") if (tmp_path / "run" / "metrics.jsonl").exists() else True


def test_it_is_no_part_of_what_the_run_measures(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Its peak is its own: memory.json compares the run's."""
    meter, held = Meter(real_place(torch.device("cpu"))), iter([10, 500, 30, 40])
    monkeypatch.setattr("framework.run.record.meter.resident_bytes", lambda: next(held))
    with meter.separate():
        meter.observe("forward")
        assert meter.allocated == 500
    assert (meter.allocated, meter.phases, meter.phase) == (10, {"load": 10}, "end")
    meter.observe("forward")
    assert meter.allocated == 40


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"mixed_precision_dtype": "fp16"},
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
        {"optimizer": "schedule_free_adamw"},
    ],
)
def test_a_trial_leaves_weights_states_and_scale_alone(training):
    """The steps after it are the same as without it."""
    plain, tried = tiny_assembly(tiny_config(training=training)), tiny_assembly(tiny_config(training=training))
    before = [parameter.detach().clone() for parameter in tried.trained]
    trial_step(tried, [unequal_rows(), unequal_rows()])
    assert all(torch.equal(a, b) for a, b in zip(before, tried.trained, strict=True))
    assert not any(tried.optimizer.state.values())
    assert all(parameter.grad is None for parameter in tried.trained)
    assert tried.loss_scale.state() == plain.loss_scale.state()
    for step in (1, 2):
        assert train_step(tried, split(unequal_rows(), 8), step) == train_step(plain, split(unequal_rows(), 8), step)
    assert all(torch.equal(a, b) for a, b in zip(plain.trained, tried.trained, strict=True))


def test_optimizer_states_have_a_stand_in_of_the_planned_size(monkeypatch):
    """AdamW keeps two float32 numbers a weight, which are there from the second step on."""
    rehearsal = record(tiny_config(training={"optimizer": "adamw_torch_fused"}))
    weights = rehearsal.footprint.trainable_parameters
    assert planned_states(make_plan(rehearsal)) == pytest.approx(8 * weights, rel=0.02)
    monkeypatch.setattr(trial, "PIECE", 1000)
    pieces = stand_in(2500, real_place(torch.device("cpu")))
    assert [piece.numel() for piece in pieces] == [1000, 1000, 500]
    assert PIECE == 1 << 28

"""Steps whose figures are read one step late, as on a card: the same run, and non-finite values change nothing."""

import pytest
import torch

from framework.build.scaler import takes_found_inf
from framework.errors import NonFinite
from framework.run import trainer
from framework.run.step import LaunchedStep, launch_step
from tests.run.test_trainer import config, corpus, final_weights, metrics, same, train  # noqa: F401
from tests.tiny import tiny_assembly, tiny_config, unequal_rows

FUSED = {"optimizer": "adamw_torch_fused", "learning_rate": 1e-2}


def spoil(assembly, passes):
    """Make a gradient infinite in backward passes of these numbers, from 1."""
    seen = [0]

    def hook(gradient):
        seen[0] += 1
        return gradient * float("inf") if seen[0] in passes else gradient

    assembly.trained[3].register_hook(hook)


def state(assembly):
    optimizer = assembly.optimizer
    tensors = [*assembly.trained, *(value for part in optimizer.state.values() for value in part.values())]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("offload", ["none", "host"])
def test_neither_a_step_that_is_not_finite_nor_one_after_it_changes_anything(offload):
    """Weights, moments and counts of steps; until the host has seen it."""
    assembly = tiny_assembly(tiny_config(training={**FUSED, "optimizer_offload": offload}))
    launch_step(assembly, [unequal_rows()], 1).result()
    before = state(assembly)
    spoil(assembly, {1})
    second, third = (launch_step(assembly, [unequal_rows()], step) for step in (2, 3))
    spoiled = [name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad][3]
    message = rf"step 2: loss \d.*gradient norm inf.*first gradient that is not finite: {spoiled}"
    with pytest.raises(NonFinite, match=message):
        second.result()
    assert third.result().loss > 0
    assert all(torch.equal(now, then) for now, then in zip(state(assembly), before, strict=True))
    launch_step(assembly, [unequal_rows()], 3).result()
    assert not any(torch.equal(now, then) for now, then in zip(state(assembly), before, strict=True))


def test_a_loss_that_is_not_finite_changes_nothing_either():
    assembly = tiny_assembly(tiny_config(training=FUSED))
    launch_step(assembly, [unequal_rows()], 1).result()
    assembly.trained[0].data[0] = float("nan")
    before = state(assembly)
    launched = launch_step(assembly, [unequal_rows()], 2)
    assert all(
        torch.equal(now.nan_to_num(7), then.nan_to_num(7)) for now, then in zip(state(assembly), before, strict=True)
    )
    with pytest.raises(NonFinite, match="step 2: loss nan"):
        launched.result()


@pytest.mark.parametrize(("optimizer", "takes"), [("adamw_torch_fused", True), ("sgd", False), ("lion", False)])
def test_who_reads_it_on_the_device(optimizer, takes):
    assert takes_found_inf(tiny_assembly(tiny_config(training={"optimizer": optimizer})).optimizer) is takes


@pytest.fixture
def late(monkeypatch):
    """Have the host believe that figures are on their way, as on a card."""
    monkeypatch.setattr(LaunchedStep, "is_known", property(lambda self: False))


TRAINING = {"optimizer": "adamw_torch_fused", "max_steps": 7, "save_steps": 3, "eval_steps": 5}


def test_a_run_is_the_same_and_logs_every_step(corpus, tmp_path, monkeypatch):  # noqa: F811
    train(config(corpus, tmp_path / "straight", training=TRAINING))
    monkeypatch.setattr(LaunchedStep, "is_known", property(lambda self: False))
    train(config(corpus, tmp_path / "late", training=TRAINING))
    assert same(final_weights(tmp_path / "late"), final_weights(tmp_path / "straight"))
    for key in ("loss", "grad_norm", "epoch", "eval_loss", "learning_rate"):
        assert metrics(tmp_path / "late", key) == metrics(tmp_path / "straight", key)
    assert list(metrics(tmp_path / "late", "loss")) == list(range(1, 8))


def test_a_step_that_is_not_finite_is_named_with_its_rows_and_is_the_last(corpus, tmp_path, monkeypatch, late):  # noqa: F811
    made = []

    def spoiling(assembly, batches, step, *others):
        made.append(step)
        if step == 1:
            spoil(assembly, {5})
        return launch_step(assembly, batches, step, *others)

    monkeypatch.setattr(trainer, "launch_step", spoiling)
    one_pass = {**TRAINING, "per_device_train_batch_size": 4, "global_batch_size": 4}
    with pytest.raises(NonFinite, match=r"step 5: .*Training rows of this step: \[\d+, "):
        train(config(corpus, tmp_path / "run", training={**one_pass, "eval_steps": None}))
    assert made[-1] == 6
    assert list(metrics(tmp_path / "run", "loss")) == [1, 2, 3, 4]
    assert (tmp_path / "run" / "stopped.txt").read_text().startswith("step: 5\n")

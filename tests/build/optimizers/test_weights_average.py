"""`training.ema_decay`: the average against its own arithmetic; evaluated, exported, saved, resumed and planned."""

import dataclasses

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.averages import averaged, take_average
from framework.build.loading.model import read_architecture
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.place import real_place
from framework.build.verify import FirstStep, verify_first_step
from framework.errors import VerificationFailed
from framework.memory.cards import read_card
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.evaluate import evaluate
from framework.run.step import launch_step, train_step
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.optimizers import ON_CPU, eager, state_bytes, training  # noqa: F401
from tests.tiny import tiny_assembly, tiny_config, unequal_rows

DECAY = 0.75


def assembled(optimizer="adamw_torch", peft=None, model=None, **more):
    asked = training(optimizer, ema_decay=DECAY, **more) | ({"use_peft": True} if peft else {})
    return tiny_assembly(tiny_config(training=asked, model=model or {}, **({"peft": peft} if peft else {})))


def stepped(assembly, steps):
    """Train, and compute the average next to it: name -> weights."""
    named = {name: item for name, item in assembly.model.named_parameters() if item.requires_grad}
    expected = {name: item.detach().float().clone() for name, item in named.items()}
    for step in range(1, steps + 1):
        train_step(assembly, [unequal_rows()], step)
        expected = {name: DECAY * old + (1 - DECAY) * named[name].detach().float() for name, old in expected.items()}
    return expected


def held(assembly):
    return {
        name: assembly.optimizer.state[item][AVERAGE]
        for name, item in assembly.model.named_parameters()
        if item.requires_grad
    }


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("optimizer", [each for each in ON_CPU if each.values != ("schedule_free_adamw",)])
def test_the_average_follows_every_optimizer(optimizer):
    assembly = assembled(optimizer)
    expected = stepped(assembly, 3)
    torch.testing.assert_close(held(assembly), expected)
    readings = {item.key: item for item in verify_first_step(assembly, FirstStep(((8, 24),)))}
    assert readings["optimizer states"].holds
    assert readings["training.ema_decay"].found == f"0.75 on the device, of {len(expected)} tensors"


def test_offloaded_states_leave_it_where_it_is():
    assembly = assembled(optimizer_offload="host")
    torch.testing.assert_close(stepped(assembly, 2), held(assembly))
    verify_first_step(assembly, FirstStep(((8, 24),)))
    assert not any(AVERAGE in each for each in assembly.optimizer.held.values())


def test_of_bfloat16_weights_it_is_float32():
    """A step of 1 - decay would round away."""
    assembly = assembled(model={"torch_dtype_str": "bfloat16"}, mixed_precision_dtype="none")
    expected = stepped(assembly, 3)
    assert {average.dtype for average in held(assembly).values()} == {torch.float32}
    torch.testing.assert_close(held(assembly), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_host_it_is_what_it_is_on_the_card(dtype):
    found = []
    for where in ("device", "host"):
        config = tiny_config(
            model={"torch_dtype_str": dtype},
            training=training("adamw_torch_fused", ema_decay=DECAY, ema_device=where, mixed_precision_dtype="none"),
            gpu=read_card("h200_141gb"),
        )
        torch.manual_seed(0)
        assembly = assemble(config, read_architecture(config), real_place(torch.device("cuda", 0)), 10)
        batch = {key: value.cuda() for key, value in unequal_rows().items()}
        for step in (1, 2, 3):
            train_step(assembly, [batch], step)
        assert {average.device.type for average in held(assembly).values()} == {"cuda" if where == "device" else "cpu"}
        found.append({name: average.cpu() for name, average in held(assembly).items()})
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("export", [True, False])
def test_evaluation_and_export_use_it_if_requested_and_training_continues_from_its_own_weights(export):
    assembly = assembled(export_ema=export)
    expected = stepped(assembly, 3)
    trained = {name: item.detach().clone() for name, item in assembly.model.named_parameters()}
    with averaged(assembly):
        inside = {name: item.detach().clone() for name, item in assembly.model.named_parameters()}
    torch.testing.assert_close(inside, expected if export else trained)
    loss = evaluate(assembly, [unequal_rows()], lambda phase: None)["eval_loss"]
    for name, item in assembly.model.named_parameters():
        assert torch.equal(item, trained[name])
    take_average(assembly)
    plain = tiny_assembly(tiny_config())
    plain.model.load_state_dict(assembly.model.state_dict())
    assert loss == pytest.approx(evaluate(plain, [unequal_rows()], lambda phase: None)["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("peft", [None, {"lora_target_modules": ["q_proj"]}])
def test_a_resumed_run_resumes_with_it(peft, tmp_path):
    straight = assembled(peft=peft)
    stepped(straight, 4)
    first = assembled(peft=peft)
    stepped(first, 2)
    path = save_checkpoint(tmp_path, contents_of(first, 2), 2)
    resumed = assembled(peft=peft)
    load_checkpoint(path, resumed)
    for step in (3, 4):
        train_step(resumed, [unequal_rows()], step)
    torch.testing.assert_close(held(resumed), held(straight), rtol=0, atol=0)


def test_it_is_four_bytes_a_trained_weight_among_the_states():
    plain, assembly = tiny_assembly(tiny_config()), assembled()
    train_step(plain, [unequal_rows()], 1)
    stepped(assembly, 1)
    assert state_bytes(assembly) - state_bytes(plain) == 4 * sum(item.numel() for item in assembly.trained)


def test_a_step_that_is_not_finite_leaves_it():
    """If the device itself skips the update, the host does not know of it yet."""
    assembly = assembled("adamw_torch_fused")
    expected = stepped(assembly, 1)
    assembly.trained[0].register_hook(lambda gradient: gradient * float("nan"))
    launch_step(assembly, [unequal_rows()], 2)
    torch.testing.assert_close(held(assembly), expected)


def test_an_average_that_is_not_kept_stops_the_run():
    plain, asked = tiny_assembly(tiny_config()), assembled()
    train_step(plain, [unequal_rows()], 1)
    with pytest.raises(VerificationFailed, match=r"ema_decay: asked 0\.75"):
        verify_first_step(dataclasses.replace(plain, config=asked.config), FirstStep(((8, 24),)))


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"optimizer": "schedule_free_adamw"}, "training.optimizer"),
        ({"optimizer_in_backward": True}, "training.optimizer_in_backward"),
    ],
)
def test_what_it_does_not_go_with_is_refused(more, other):
    config = TrainingConfig.model_validate({"training": {"ema_decay": DECAY, **more}})
    found = {item.keys for item in find_conflicts(config, Needs()) if not item.is_warning}
    assert ("training.ema_decay", other) in found

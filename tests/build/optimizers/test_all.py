"""Every optimizer: it trains, it is the requested one, and its states are those that the plan counts."""

import dataclasses

import pytest
import torch

from framework.build.verify import FirstStep, verify, verify_first_step
from framework.errors import RequestError, VerificationFailed
from framework.run.step import train_step
from tests.grids import chosen, thinned
from tests.optimizers import BF16, ON_CPU, UNLIKE, WIDE, eager, training  # noqa: F401
from tests.tiny import tiny_assembly, tiny_config, unequal_rows

LEVERS = {"in backward": {"optimizer_in_backward": True}, "on the host": {"optimizer_offload": "host"}}
SEEN = FirstStep(((8, 24),))


def assembled(optimizer, architecture=WIDE, model=None, **more):
    return tiny_assembly(tiny_config(architecture, training=training(optimizer, **more), model=model or {}))


def stepped(assembly, steps=1):
    return [train_step(assembly, [unequal_rows()], step).loss for step in range(1, steps + 1)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("optimizer", "dtype"), chosen(UNLIKE, thinned(ON_CPU, ["float32", "bfloat16"])))
def test_the_loss_falls_and_everything_is_read_back(optimizer, dtype):
    """From the same weights in both: torch 2.11 and 2.13 draw others in bfloat16."""
    assembly, drawn = assembled(optimizer, model={"torch_dtype_str": dtype}), assembled(optimizer)
    assembly.model.load_state_dict(drawn.model.state_dict())
    verify(assembly)
    first, *_, last = stepped(assembly, 20)
    assert last < 0.6 * first
    [states] = [reading for reading in verify_first_step(assembly, SEEN) if reading.key == "optimizer states"]
    assert states.holds
    assert "bytes a trained parameter" in states.source


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("optimizer", "lever"),
    chosen(("adamw_torch_fused", "adafactor", "muon", "schedule_free_adamw"), thinned(ON_CPU, LEVERS)),
)
def test_updates_in_backward_and_states_on_the_host_learn_the_same(optimizer, lever):
    """Exact for what treats each parameter by itself; refused pairs are in tests/schema/rules/test_optimizer.py."""
    low_bit = "bit" in optimizer
    if low_bit and ("optimizer_offload" in lever or "torchao" in optimizer):
        pytest.skip("refused")
    plain = assembled(optimizer, max_grad_norm=0.0)
    expected = stepped(plain, 3)
    assembly = assembled(optimizer, max_grad_norm=0.0, **lever)
    verify(assembly)
    assert stepped(assembly, 3) == pytest.approx(expected, abs=1e-6)
    verify_first_step(assembly, SEEN)
    for one, other in zip(plain.trained, assembly.trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_states_of_another_dtype_than_asked_for_stop_the_run():
    """A low-memory optimizer was rebuilt behind our back as one with larger states."""
    assembly = assembled("anyprecision_adamw", model=BF16)
    stepped(assembly)
    for state in assembly.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    with pytest.raises(VerificationFailed, match="exp_avg bfloat16 x"):
        verify_first_step(assembly, SEEN)


@pytest.mark.parametrize("optimizer", ["lion", "muon", "schedule_free_adamw", "galore_adamw"])
def test_another_class_than_asked_for_stops_the_run(optimizer):
    assembly = assembled(optimizer)
    other = torch.optim.Adam(assembly.trained)
    with pytest.raises(VerificationFailed, match=f"asked {optimizer}, in effect Adam"):
        verify(dataclasses.replace(assembly, optimizer=other))


def test_galore_in_place_of_apollo_stops_the_run():
    assembly, other = assembled("apollo_adamw"), assembled("galore_adamw")
    mixed = dataclasses.replace(other, config=assembly.config)
    with pytest.raises(VerificationFailed, match="asked apollo_adamw, in effect galore_adamw"):
        verify(mixed)


def test_states_that_stayed_on_the_device_stop_the_run():
    assembly = assembled("adamw_torch", optimizer_offload="host")
    stepped(assembly)
    state = next(iter(assembly.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()
    with pytest.raises(VerificationFailed, match="optimizer_offload: asked host"):
        verify_first_step(assembly, SEEN)


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_a_recipe_names_it_by_its_group(optimizer):
    from framework.compose import draft

    overrides = [f"optimizer={optimizer}", "model=smollm2_135m"]
    assert str(draft("quickstart", overrides).config.training.optimizer) == optimizer


LORA = {"lora_r": 8, "lora_target_modules": ["all-linear"]}


@pytest.mark.parametrize(
    ("choice", "more", "peft", "model", "message"),
    [
        ("galore_adamw", {"projection_rank": 64}, {}, {}, "above 64, and the widest that is trained has 64"),
        ("apollo_adamw", {"projection_rank": 128}, {}, {}, "above 128, and the widest that is trained has 64"),
        ("galore_adamw", {}, LORA, {}, "above 16, and the widest that is trained has 8"),
        ("muon", {}, {}, {"freeze_layers": ["layers.*"]}, "none is trained"),
        ("muon", {}, {"peft_method": "prompt"}, {}, "none is trained"),
    ],
)
def test_an_optimizer_of_matrices_that_would_find_none_is_refused(choice, more, peft, model, message):
    """It would have trained everything with AdamW under the name of another."""
    settings = training(choice, use_peft=bool(peft), **more) if not more else {"optimizer": choice, **more}
    with pytest.raises(RequestError, match=message):
        tiny_assembly(tiny_config(WIDE, training=settings, model=model, peft=peft))


def test_the_share_that_an_optimizer_treats_as_matrices_is_reported():
    """Embeddings and head: 2 x 128 x 64; a block: 2 x 64 x 64 + 2 x 32 x 64 + 3 x 128 x 64; five norms of 64."""
    matrices = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    share = matrices / (matrices + 2 * 128 * 64 + 5 * 64)
    [reading] = [item for item in verify(assembled("muon")) if item.key == "training.optimizer"]
    assert reading.source.endswith(f"14 matrices, {share:.0%} of the trained weights; AdamW has the others")

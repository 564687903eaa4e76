"""`training.fp8`: which layers are converted, what it computes, what refuses it. torchao is an optional extra."""

import importlib.util

import pytest
import torch

from framework.build import float8
from framework.build.float8 import linear_layers
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.memory.cards import read_card
from framework.memory.requirements import unmet_requirements
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.rules import Needs, find_conflicts
from tests.optimizers import needs
from tests.tiny import LLAMA, tiny_assembly, tiny_config, unequal_rows

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
BF16 = {"torch_dtype_str": "bfloat16"}


@pytest.fixture
def emulated(monkeypatch):
    """The same numbers in float32: a CPU has no products of 8-bit floats."""
    real = float8.float8_config
    monkeypatch.setattr(float8, "float8_config", lambda recipe: real(recipe, emulate=True))


def losses(recipe, **training):
    config = tiny_config(WIDE, training={"fp8": recipe, "learning_rate": 1e-2, **training}, model=BF16)
    assembly = tiny_assembly(config)
    verify(assembly)
    return assembly, [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 7)]


@needs("torchao")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("training", [{}, {"enable_gradient_checkpointing": True}])
def test_it_learns_nearly_as_bfloat16_does_and_is_read_back(emulated, recipe, training):
    _, plain = losses("none", **training)
    assembly, rounded = losses(recipe, **training)
    assert rounded == pytest.approx(plain, rel=0.05)
    assert rounded != plain
    [reading] = [item for item in verify(assembly) if item.key == "training.fp8"]
    assert reading.found == f"{recipe} in 14 layers"
    assert {name for name, _ in assembly.model.named_parameters()} == {
        name for name, _ in losses("none")[0].model.named_parameters()
    }


@needs("torchao")
def test_a_layer_that_is_not_converted_stops_the_run(emulated):
    assembly, _ = losses("tensorwise")
    block = assembly.model.model.layers[0].self_attn
    block.q_proj = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    with pytest.raises(VerificationFailed, match="asked tensorwise in 14 layers, in effect tensorwise in 13 layers"):
        verify(assembly)


def test_head_and_matrices_of_odd_sides_are_left_out():
    names = linear_layers(tiny_assembly(tiny_config({**WIDE, "intermediate_size": 120})).model)
    assert len(names) == 8
    assert not any("lm_head" in name or "mlp" in name for name in names)


def test_without_the_package_a_plan_too_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="torchao"):
        tiny_assembly(tiny_config(WIDE, training={"fp8": "tensorwise"}, model=BF16))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"use_peft": True}}, "training.use_peft"),
        ({"training": {"mixed_precision_dtype": "fp16"}}, "training.mixed_precision_dtype"),
        (
            {"training": {"mixed_precision_dtype": "none"}, "model": {"torch_dtype_str": "float32"}},
            "model.torch_dtype_str",
        ),
    ],
)
def test_what_it_cannot_be_beside_is_refused(sections, key):
    config = TrainingConfig(training={"fp8": "rowwise", **sections.pop("training")}, **sections)
    assert any(
        {"training.fp8", key} <= set(item.keys) and not item.is_warning for item in find_conflicts(config, Needs())
    )


@pytest.mark.parametrize(("card", "is_refused"), [("a100_80gb", True), ("rtx4090_24gb", False), ("cpu", True)])
def test_cards_before_ada_are_refused(card, is_refused):
    config = TrainingConfig(training={"fp8": "tensorwise"}, gpu=read_card(card))
    found = [item for item in unmet_requirements(config, runs_here=False) if item.keys[0] == "training.fp8"]
    assert bool(found) is is_refused


def test_without_compilation_it_is_warned_that_nothing_is_won():
    config = TrainingConfig(training={"fp8": "tensorwise"})
    assert any(item.is_warning and "training.compile" in item.keys for item in find_conflicts(config, Needs()))

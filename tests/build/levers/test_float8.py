"""`training.fp8`: which layers are converted, what it computes, what refuses it. torchao is an optional extra."""

import copy
import importlib.util

import pytest
import torch

from framework.build.levers import float8
from framework.build.levers.float8 import Float8Base, hold_in_float8, linear_layers
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.memory.cards import read_card
from framework.memory.requirements import unmet_requirements
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.choices import Fp8
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.grids import thinned
from tests.optimizers import needs
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_assembly, tiny_config, unequal_rows

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
RECIPES = ["tensorwise", "rowwise"]
TRAINING = {"plain": {}, "checkpoints": {"enable_gradient_checkpointing": True}}
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
@pytest.mark.parametrize(("training", "recipe"), thinned(TRAINING, RECIPES))
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
    names = linear_layers(tiny_assembly(tiny_config({**WIDE, "intermediate_size": 120})).model, frozen=False)
    assert len(names) == 8
    assert not any("lm_head" in name or "mlp" in name for name in names)


def test_without_the_package_a_plan_too_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="torchao"):
        tiny_assembly(tiny_config(WIDE, training={"fp8": "tensorwise"}, model=BF16))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"mixed_precision_dtype": "fp16"}}, "training.mixed_precision_dtype"),
        (
            {"training": {"mixed_precision_dtype": "none"}, "model": {"torch_dtype_str": "float32"}},
            "model.torch_dtype_str",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(sections, key):
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


LORA = {"lora_r": 16, "lora_target_modules": ["all-linear"]}


def adapter_losses(recipe, **training):
    training = {"fp8": recipe, "learning_rate": 1e-2, "use_peft": True, "mixed_precision_dtype": "none", **training}
    assembly = tiny_assembly(tiny_config(WIDE, training=training, model=BF16, peft=LORA))
    readings = [item for item in verify(assembly) if item.key == "training.fp8"]
    return assembly, readings, [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 7)]


@pytest.mark.parametrize(("training", "recipe"), thinned(TRAINING, RECIPES))
def test_the_frozen_base_of_an_adapter_is_held_in_fp8_and_learns_nearly_as_bfloat16(recipe, training):
    _, _, plain = adapter_losses("none", **training)
    assembly, [reading], rounded = adapter_losses(recipe, **training)
    assert rounded == pytest.approx(plain, rel=2e-3)
    assert rounded != plain
    assert rounded[-1] < rounded[0] - 0.1
    assert reading.found == f"{recipe} in 14 layers"
    held = [module for module in assembly.model.modules() if isinstance(module, Float8Base)]
    # a block: q and o 64 x 64, k and v 64 x 64, three of 64 x 128, a byte each
    assert sum(module.weight.nbytes for module in held) == 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert {parameter.dtype for parameter in assembly.trained} == {torch.float32}


@pytest.mark.parametrize("kind", [Fp8.TENSORWISE, Fp8.ROWWISE])
def test_products_of_a_held_layer_and_its_input_gradient_are_within_the_rounding(kind):
    """Each operand is off by at most 2^-4 of an element, at random: sums over 256 come out within a few per cent."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(256, 128, bias=True).requires_grad_(False)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(128, 256, generator=generator) * torch.logspace(-2, 0, 128)[:, None])
    held = copy.deepcopy(plain).to(torch.bfloat16)
    hold_in_float8(held, kind)
    assert held.scales.shape == ((128, 1) if kind is Fp8.ROWWISE else (1, 1))
    values = torch.randn(3, 7, 256, generator=generator)
    found = []
    for layer, dtype in ((plain, torch.float32), (held, torch.bfloat16)):
        rows = values.to(dtype, copy=True).requires_grad_()
        result = layer(rows)
        assert result.dtype is dtype
        result.backward(torch.ones_like(result))
        found.append((result.detach().float(), rows.grad.float()))
    for exact, rounded in zip(*found, strict=True):
        assert float((exact - rounded).norm() / exact.norm()) < 0.05


def test_a_base_layer_left_in_bfloat16_stops_the_run():
    assembly, _, _ = adapter_losses("rowwise")
    name, layer = next(item for item in assembly.model.named_modules() if isinstance(item[1], Float8Base))
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
    assembly.model.set_submodule(name, plain.requires_grad_(False))
    with pytest.raises(VerificationFailed, match="asked rowwise in 14 layers, in effect rowwise in 13 layers"):
        verify(assembly)


def test_the_plan_of_a_base_in_fp8_has_half_its_bytes_and_needs_no_torchao(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = {"use_peft": True, "mixed_precision_dtype": "none"}
    weights = []
    for recipe in ("none", "rowwise"):
        config = tiny_config(WIDE, training={"fp8": recipe, **settings}, model=BF16, peft=LORA, gpu=H100.model_dump())
        weights.append(sum(record(config).footprint.weight_sizes))
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    scales = 4 * 2 * (4 * 64 + 2 * 128 + 64)
    assert weights[0] - weights[1] == matrices - scales


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"peft": {"q_lora": True}}, "peft.q_lora"),
        ({"peft": {"peft_method": "dora"}}, "peft.peft_method"),
        ({"peft": {"peft_save_mode": "merged"}}, "peft.peft_save_mode"),
        ({"model": {"torch_dtype_str": "float32"}}, "model.torch_dtype_str"),
        ({"model": {"offload_frozen_base": True}}, "model.offload_frozen_base"),
        ({"gpu": {"count": 2}}, "gpu.count"),
    ],
)
def test_what_a_base_in_fp8_cannot_be_combined_with_is_refused(sections, key):
    config = TrainingConfig(training={"fp8": "rowwise", "use_peft": True}, **sections)
    assert any(
        {"training.fp8", key} <= set(item.keys) and not item.is_warning for item in find_conflicts(config, Needs())
    )

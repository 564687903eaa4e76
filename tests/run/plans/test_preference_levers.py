"""Preferences next to the levers: the reference is the same model whatever the policy's forward pass is made of."""

import math

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from framework.build.levers import compiled
from framework.run.evaluate import evaluate
from framework.run.rehearsal.footprint import read_footprint
from framework.run.step import train_step
from tests.grids import first, slow, thinned
from tests.tiny import LLAMA, pairs, split_pairs, tiny_assembly, tiny_config

LORA = {"lora_r": 4, "lora_target_modules": ["all-linear"]}
TRAINING = {"task": "preference", "learning_rate": 1e-2, "max_grad_norm": 0.0, "mixed_precision_dtype": "none"}


def run(adapted, training=None, model=None, peft=None, whole=False, **preference):
    """Losses of three steps, and the margin after them."""
    asked = {**TRAINING, "use_peft": adapted, "preference": preference, **(training or {})}
    sections = {"peft": {**LORA, **(peft or {})}} if adapted else {}
    model = {"torch_dtype_str": "float32", **(model or {})}
    assembly = tiny_assembly(tiny_config(training=asked, model=model, **sections))
    parts = [pairs()] if whole else split_pairs(pairs(), 2)
    losses = [train_step(assembly, parts, step).loss for step in range(1, 4)]
    return [*losses, evaluate(assembly, [pairs()], lambda _: None)["reward_margin"]]


@pytest.fixture(scope="module")
def plain():
    return {adapted: run(adapted) for adapted in (False, True)}


@pytest.mark.parametrize(
    ("adapted", "sections"),
    thinned(
        {"full": False, "lora": True},
        {
            "offload": {"training": {"activation_offload": True}},
            "recompute": {"training": {"enable_gradient_checkpointing": True}},
            "in backward": {"training": {"optimizer_in_backward": True}, "whole": True},
            "fp16": {"training": {"mixed_precision_dtype": "fp16"}},
            "eager": {"model": {"attn_implementation": "eager"}},
            "chunks": {"model": {"chunked_loss": 8}, "training": {"enable_gradient_checkpointing": True}},
        },
    ),
)
def test_a_lever_does_not_change_the_trained_weights(plain, adapted, sections):
    half = "fp16" in str(sections)
    assert run(adapted, **sections) == pytest.approx(plain[adapted], rel=2e-2 if half else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [slow(False), True], ids=["full", "lora"])
def test_compiled_blocks_are_for_the_policy_alone(plain, adapted, monkeypatch):
    monkeypatch.setattr(compiled, "lower", aot_eager)
    torch._dynamo.reset()
    assert run(adapted, training={"compile": True}) == pytest.approx(plain[adapted], rel=1e-4)


def test_a_streamed_base_is_its_own_reference_and_its_copies_are_counted(plain):
    assert run(True, model={"offload_frozen_base": True}) == pytest.approx(plain[True], rel=1e-4)
    four = {**LLAMA, "num_hidden_layers": 4}
    for loss in ("dpo", "orpo"):
        training = {**TRAINING, "use_peft": True, "preference": {"loss_type": loss}}
        assembly = tiny_assembly(tiny_config(four, training=training, model={"offload_frozen_base": True}, peft=LORA))
        train_step(assembly, [pairs()], 1)
        before = assembly.streamed.copied_bytes
        train_step(assembly, [pairs()], 2)
        assert assembly.streamed.copied_bytes - before == read_footprint(assembly).streamed_bytes, loss


@pytest.mark.parametrize("method", first(2, ["prompt", "ia3", "prefix", "vera", "dora"]))
def test_other_adapters_are_taken_away_too(method):
    tokens = {"num_virtual_tokens": 3} if method in ("prompt", "prefix") else {}
    *losses, margin = run(True, peft={"peft_method": method, **tokens})
    assert losses[0] == pytest.approx(math.log(2), abs=5e-3), "a trained prompt starts from random tokens"
    assert losses[2] < losses[0]
    assert margin > 0

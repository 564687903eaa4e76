"""Targets with exclusions, in some blocks only, and with their own ranks."""

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from framework.build.verify import verify
from framework.errors import RequestError
from framework.run.rehearsal.rehearse import record
from tests.build.adapters.test_adapter import MOE, adapted, steps
from tests.tiny import LLAMA, tiny_assembly

HIDDEN, INNER = LLAMA["hidden_size"], LLAMA["intermediate_size"]


def trained(config):
    return {name: p.shape for name, p in tiny_assembly(config).model.named_parameters() if p.requires_grad}


def ranks(config):
    found = trained(config)
    return {
        name.removeprefix("base_model.model.model.layers.").removesuffix(".lora_A.default.weight"): shape[0]
        for name, shape in found.items()
        if "lora_A" in name
    }


def problems(**peft):
    with pytest.raises(RequestError) as error:
        tiny_assembly(adapted(**peft))
    return [(problem.key, problem.message) for problem in error.value.problems]


def test_what_is_excluded_has_no_adapter():
    found = ranks(adapted(lora_exclude_modules=["k_proj", r"layers\.0\.mlp\..*"]))
    assert not any("k_proj" in name or name.startswith("0.mlp") for name in found)
    assert {"0.self_attn.q_proj", "1.mlp.up_proj", "1.self_attn.v_proj"} <= found.keys()


def test_blocks_by_number():
    found = ranks(adapted(layers_to_transform=[1]))
    assert found
    assert all(name.startswith("1.") for name in found)


def test_ranks_and_alphas_of_some_targets():
    config = adapted(
        lora_r=4,
        lora_alpha=8,
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.(up|gate)_proj": 6},
        alpha_pattern={"q_proj": 16},
    )
    found = ranks(config)
    assert {name: rank for name, rank in found.items() if rank != 4} == {
        **{"0.self_attn.q_proj": 2, "1.self_attn.q_proj": 2},
        **{"1.mlp.up_proj": 6, "1.mlp.gate_proj": 6},
    }
    assembly = tiny_assembly(config)
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["peft.lora_r"].found == "2 (2), 4 (10), 6 (2)"
    assert readings["peft.alpha_pattern"].found == "8 (12), 16 (2)"
    layer = assembly.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == 16 / 2
    losses = steps(assembly, 3)
    assert losses[-1] < losses[0]


def test_the_plan_counts_the_ranks():
    """Seven layers a block; rank x (in + out) each, counted by hand for one of another rank."""
    even, uneven = (adapted(lora_r=4, rank_pattern=pattern) for pattern in ({}, {"down_proj": 10}))
    sizes = [record(config).footprint.trainable_parameters for config in (even, uneven)]
    assert sizes[1] - sizes[0] == LLAMA["num_hidden_layers"] * (10 - 4) * (HIDDEN + INNER)


def test_plain_peft_loads_what_was_saved(tmp_path):
    config = adapted(lora_r=4, rank_pattern={"q_proj": 2}, lora_exclude_modules=["v_proj"], layers_to_transform=[0])
    assembly = tiny_assembly(config)
    steps(assembly, 1)
    assembly.adapter.model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(tiny_assembly(config).model.config), tmp_path)
    expected = {name: p.shape for name, p in assembly.model.named_parameters() if "lora_" in name}
    assert {name: p.shape for name, p in again.named_parameters() if "lora_" in name} == expected


def test_a_pattern_that_fits_nothing_is_named():
    [(key, message)] = problems(lora_exclude_modules=["c_attn"])
    assert key == "peft.lora_exclude_modules[0]"
    assert "'c_attn'" in message
    assert problems(rank_pattern={"c_attn": 4})[0][0] == "peft.rank_pattern.c_attn"
    assert problems(layers_to_transform=[7])[0][0] == "peft.layers_to_transform"
    assert problems(lora_exclude_modules=[".*"])[0][1] == "no target is left to adapt"
    assert "not a regular expression" in problems(lora_exclude_modules=["("])[0][1]
    for value in (0, -1, 1.5, "four", True):
        assert problems(rank_pattern={"q_proj": value})[0][0] == "peft.rank_pattern.q_proj"
    assert problems(alpha_pattern={"q_proj": 0})[0][0] == "peft.alpha_pattern.q_proj"


def test_stacked_experts_have_the_common_rank():
    assert problems(architecture=MOE, rank_pattern={"mlp.experts": 4})[0][0] == "peft.rank_pattern.mlp.experts"
    config = adapted(architecture=MOE, lora_r=2, rank_pattern={"q_proj": 4})
    readings = {reading.key: reading for reading in verify(tiny_assembly(config))}
    assert readings["peft.lora_r"].found == "2 (10), 4 (2)"

"""Stretched rotary positions: the frequencies that are computed with, the limit, and the config that is saved."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from framework.build.loading.model import read_architecture
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.checks import TRAIN, check_request
from framework.errors import RequestError, VerificationFailed
from framework.run.rehearsal.rehearse import record
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config

TRAINED, HEAD = 128, 8
"""Positions of LLAMA, and the size of its heads."""
PLAIN = torch.tensor([10000 ** (-2 * index / HEAD) for index in range(HEAD // 2)])


def config(architecture: dict[str, Any] = LLAMA, length: int | None = None, **scaling: Any) -> Any:
    return tiny_config(architecture, model={"rope_scaling": scaling, "model_max_length": length})


def frequencies(assembly: Any) -> torch.Tensor:
    return assembly.model.model.rotary_emb.inv_freq


def test_linear_divides_every_frequency():
    found = frequencies(tiny_assembly(config(rope_type="linear", factor=4)))
    torch.testing.assert_close(found, PLAIN / 4)


def test_llama3_stretches_slow_ones_and_leaves_fast_ones():
    scaling = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}
    found = frequencies(tiny_assembly(config(**scaling)))
    turns = TRAINED * PLAIN / (2 * math.pi)
    share = ((turns - 1) / 3).clamp(0, 1)
    torch.testing.assert_close(found, PLAIN / 4 * (1 - share) + PLAIN * share)
    assert share[0] == 1
    assert share[-1] == 0


def test_yarn_scales_cosines_and_sines_too():
    rotary = tiny_assembly(config(rope_type="yarn", factor=4)).model.model.rotary_emb
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    torch.testing.assert_close(rotary.inv_freq[-1], PLAIN[-1] / 4)
    other = tiny_assembly(config(rope_type="yarn", factor=4, attention_factor=1.5)).model.model.rotary_emb
    assert other.attention_scaling == 1.5


def test_dynamic_changes_rows_that_are_longer_than_the_model_was_trained_on_and_no_others():
    plain, scaled = tiny_assembly(tiny_config()), tiny_assembly(config(length=200, rope_type="dynamic", factor=4))
    ids = torch.arange(200)[None] % 128
    with torch.no_grad():
        for length, same in ((TRAINED, True), (200, False)):
            one, other = (item.model(ids[:, :length]).logits for item in (plain, scaled))
            assert torch.equal(one, other) is same


@pytest.mark.parametrize(("kind", "positions"), [("linear", 512), ("yarn", 512), ("llama3", 512), ("dynamic", 128)])
def test_it_is_in_effect_and_in_the_saved_config(kind, positions, tmp_path):
    assembly = tiny_assembly(config(rope_type=kind, factor=4))
    [reading] = [item for item in verify(assembly) if item.key == "model.rope_scaling"]
    assert reading.found == f"{kind} x 4"
    assembly.model.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    assert saved.max_position_embeddings == positions
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(100)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, assembly.model.eval()(ids).logits)


def test_a_model_that_computes_otherwise_stops_the_run():
    assembly = tiny_assembly(config(rope_type="yarn", factor=4))
    assembly.model.model.rotary_emb.rope_type = "default"
    with pytest.raises(VerificationFailed, match=r"model.rope_scaling"):
        verify(assembly)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_it_is_planned_at_a_length_beyond_the_trained_one(kind):
    settled, architecture = settle(config(length=400, rope_type=kind, factor=4))
    assert record(settled).config.longest == 400
    assert architecture.rope_parameters["rope_type"] == kind


def test_rows_longer_than_the_stretched_positions_are_refused_with_the_factor_that_fits():
    with pytest.raises(
        RequestError, match=r"600 tokens are more than the model's 512 positions, scaled by 4"
    ) as raised:
        settle(config(length=600, rope_type="yarn", factor=4))
    assert "factor: 5" in str(raised.value.problems[0].expected)
    with pytest.raises(RequestError, match=r"no rope scaling is set") as raised:
        settle(tiny_config(model={"model_max_length": 200}))
    assert "factor: 2" in str(raised.value.problems[0].expected)


def test_a_stretching_of_the_models_own_is_replaced():
    own = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}
    own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    asked = config({**LLAMA, "rope_parameters": own, "max_position_embeddings": 512}, rope_type="linear", factor=2)
    found = read_architecture(asked)
    assert found.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert found.max_position_embeddings == 128


def test_where_kinds_of_layers_differ_those_that_see_everything_are_stretched():
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16}
    found = read_architecture(config(gemma, rope_type="linear", factor=2))
    assert found.rope_parameters["full_attention"]["factor"] == 2
    assert found.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_positions_that_are_learned_are_not_stretched():
    with pytest.raises(RequestError, match=r"gpt2 has no rotary positions"):
        read_architecture(config(GPT2, rope_type="yarn", factor=2))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["model.rope_scaling={rope_type: linear, factor: 2, beta_fast: 3}"], "model.rope_scaling.beta_fast"),
        (["model.rope_scaling={rope_type: su, factor: 2}"], "model.rope_scaling.rope_type"),
        (["model.rope_scaling={rope_type: yarn, factor: 0.5}"], "model.rope_scaling.factor"),
        (["model.rope_scaling={factor: 2}"], "model.rope_scaling.rope_type"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_read(write, arguments, key):
    report = check_request(write("model: {model_name: org/x}\n"), arguments, needs=TRAIN)
    assert [problem.key for problem in report.problems if "rope" in problem.key] == [key]

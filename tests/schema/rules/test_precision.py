"""The rules about float16: gradients that cannot be unscaled, families that overflow."""

import pytest

from framework.checks import check_request
from framework.memory.resolve import describe_float16, resolve
from framework.run.planning.model_checks import inspect
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import find_derived_conflicts
from framework.schema.rules.precision import OVERFLOW_IN_FLOAT16, overflows_in_float16

RECIPE = """
model:
  architecture: {model_type: KIND, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, vocab_size: 128, dtype: bfloat16}
  load_pretrained_weights: false
training: {max_steps: 2}
"""
ADAPTED = {"lora": ["peft=lora"], "none": ["training.use_peft=false"]}


def resolved(write, kind, *overrides):
    report = check_request(write(RECIPE.replace("KIND", kind)), overrides)
    assert report.composition is not None, report.problems
    return resolve(report.composition.config)


def precision(config):
    return str(config.model.torch_dtype_str), str(config.training.mixed_precision_dtype)


@pytest.mark.parametrize("written", [[], ["training.mixed_precision_dtype=fp16"]])
@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_an_adapter_whose_gradients_cannot_be_scaled_back_is_refused(write, dtype, written):
    """torch's scaler has no kernel for bfloat16 on CUDA and refuses float16; `auto` is the base's, here float16."""
    path = write(RECIPE.replace("KIND", "llama"))
    overrides = ["gpu=t4_16gb", "peft=lora", f"peft.adapter_dtype={dtype}", *written]
    report = check_request(path, overrides)
    found = report.problems or inspect(report.composition.config).problems
    assert [problem.key for problem in found] == ["peft.adapter_dtype"]
    assert "cannot be scaled back" in found[0].message


def test_the_same_adapter_goes_with_bfloat16_and_a_float32_one_with_float16(write):
    for overrides in (["gpu=a100_40gb", "peft.adapter_dtype=bfloat16"], ["gpu=t4_16gb"]):
        assert not find_derived_conflicts(resolved(write, "llama", "peft=lora", *overrides))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "qwen3_5_moe_text", "gpt_oss", "t5"])
def test_a_family_that_overflows_is_known_by_its_kinds(kind):
    assert overflows_in_float16(kind)


@pytest.mark.parametrize("kind", ["gemma", "llama", "qwen3", "t5gemma", None])
def test_others_are_not(kind):
    assert not overflows_in_float16(kind)


def test_every_family_says_who_has_seen_it():
    assert all(source for source in OVERFLOW_IN_FLOAT16.values())


@pytest.mark.parametrize(
    ("kind", "card", "peft", "expected"),
    [
        ("gemma3_text", "t4_16gb", "lora", ("float32", "none")),
        ("gemma3_text", "v100_16gb", "none", ("float32", "none")),
        ("gemma3_text", "a100_40gb", "lora", ("bfloat16", "bf16")),
        ("llama", "t4_16gb", "lora", ("float16", "fp16")),
        ("llama", "v100_16gb", "none", ("float32", "fp16")),
    ],
)
def test_unset_precision_keeps_out_of_float16_where_the_family_overflows(write, kind, card, peft, expected):
    config = resolved(write, kind, f"gpu={card}", *ADAPTED[peft])
    assert precision(config) == expected
    assumptions = describe_float16(config, {"model_type": kind})
    assert bool(assumptions) is (expected[0] == "float32" and expected[1] == "none")
    assert all(f"{kind} is known to overflow" in line for line in assumptions)
    assert not find_derived_conflicts(config)


def test_float16_as_written_is_a_warning(write):
    report = check_request(
        write(RECIPE.replace("KIND", "gemma3_text")), ["gpu=t4_16gb", "training.mixed_precision_dtype=fp16"]
    )
    assert any("known to overflow" in warning.message for warning in report.warnings)
    config = resolve(report.composition.config)
    assert "as requested" in describe_float16(config, {"model_type": "gemma3_text"})[0]


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_shards_on_a_card_without_bfloat16_are_float32_by_default(write, peft):
    sharded = ["gpu=t4_16gb", "gpu.count=2", "fsdp.enable_fsdp=true", *ADAPTED[peft]]
    config = resolved(write, "llama", *sharded)
    assert precision(config) == ("float32", "none")
    assert not find_derived_conflicts(config)
    report = check_request(write(RECIPE.replace("KIND", "llama")), [*sharded, "training.mixed_precision_dtype=fp16"])
    (problem,) = report.problems
    assert (problem.key, problem.expected) == ("training.mixed_precision_dtype", "none (this card has no bfloat16)")


def test_the_rows_of_an_evaluation_follow_those_of_training():
    rows = {1: 1, 4: 4, 8: 8, 16: 8}
    for micro, expected in rows.items():
        config = resolve(TrainingConfig.model_validate({"training": {"per_device_train_batch_size": micro}}))
        assert config.training.per_device_eval_batch_size == expected
    written = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 8}
    assert resolve(TrainingConfig.model_validate({"training": written})).training.per_device_eval_batch_size == 8

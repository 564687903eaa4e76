"""Facts of keys are found where the keys are defined, and what follows from them is right."""

import pytest

from framework.memory.levers import LEVERS
from framework.memory.search.space import AXES
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from framework.schema.facts import Resume
from framework.schema.keys import admits_auto, every_key, left_open, moves_memory, resume_of, uses_of, value_of
from framework.schema.optimizers import FACTS, Optimizer
from framework.schema.rules.every import Needs, find_conflicts


def unused(**sections):
    """Key -> whether it is a warning, for keys found to have no effect."""
    found = find_conflicts(TrainingConfig.model_validate(sections), Needs())
    return {item.keys[0]: item.is_warning for item in found if item.message.startswith("has no effect")}


def test_a_key_has_the_facts_of_its_section_and_its_own_before_them():
    assert resume_of("gpu.sources.bf16_flops") is Resume.FREE
    assert resume_of("fsdp.cpu_offload") is Resume.FREE
    assert resume_of("training.gradient_checkpointing_kwargs.use_reentrant") is Resume.ROUNDING
    assert resume_of("peft.lora_r") is None
    assert not moves_memory("data.train[0].format")
    assert moves_memory("data.eval[0].format")
    assert [use.key for use in uses_of("peft.q_lora_bits")] == ["training.use_peft", "peft.q_lora"]


def test_every_key_that_another_is_used_with_exists():
    for key in every_key():
        for use in uses_of(key):
            assert use.key in every_key(), key


def test_auto_is_a_value_where_a_search_moves_the_key_and_nowhere_else():
    assert {key for key in every_key() if admits_auto(key)} == {*AXES, "model.model_max_length"}
    assert {row.key for row in LEVERS if row.search is not None} == set(AXES)


def test_what_is_auto_is_left_open_where_it_is_a_lever():
    training = {"compile": "auto", "per_device_train_batch_size": "auto", "run_name": "auto", "task": "distillation"}
    training["teacher"] = {"model_name": "auto", "torch_dtype_str": "auto"}
    model = {"chunked_loss": "auto", "torch_dtype_str": "auto", "freeze_layers": ["auto"]}
    config = TrainingConfig.model_validate({"training": training, "model": model, "peft": {"adapter_dtype": "auto"}})
    keys = ("training.per_device_train_batch_size", "training.compile", "model.chunked_loss")
    assert set(left_open(config)) == set(keys)


@pytest.mark.parametrize("choice", Optimizer)
def test_an_optimizer_reads_the_keys_of_its_row_and_others_are_warned_about(choice):
    plain = TrainingConfig().training
    for key in sorted({key for facts in FACTS.values() for key in facts.keys}):
        value = value_of(TrainingConfig(), f"training.{key}")
        doubled = 1.0 if value is None else value * 2 if value > 1 else value / 2 or 0.5
        other = "kahan" if key == "rounding" else doubled
        assert other != getattr(plain, key)
        found = unused(training={"optimizer": str(choice), key: other})
        assert (f"training.{key}" in found) == (key not in FACTS[choice].keys), key
    assert not unused(training={"optimizer": "auto", "adam_beta2": 0.5})


@pytest.mark.parametrize("method", PeftMethod)
def test_an_adapter_reads_the_keys_of_its_row_and_others_are_warned_about(method):
    others = {"lora_r": 3, "lora_alpha": 3.0, "lora_dropout": 0.1, "lora_plus_lr_ratio": 16.0}
    others |= {"lora_target_modules": ["q_proj"], "num_virtual_tokens": 3, "lora_exclude_modules": ["k_proj"]}
    others |= {"layers_to_transform": [0], "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}}
    others |= {"trainable_token_indices": [5]}
    others |= {"lora_init": "gaussian", "lora_freeze_a": True, "oft_block_size": 16}
    assert others.keys() == {key for facts in ADAPTERS.values() for key in facts.keys}
    for key, value in others.items():
        found = unused(training={"use_peft": True}, peft={"peft_method": str(method), key: value})
        assert (f"peft.{key}" in found) == (key not in ADAPTERS[method].keys), key


def test_names_of_numbers_are_used_in_regression_and_nowhere_else():
    """They were warned about there: a list of the tasks that use them had one too few."""
    assert not unused(training={"task": "regression"}, data={"labels": ["price"]})
    assert unused(data={"labels": ["price"]}) == {"data.labels": False}


def test_each_idle_key_is_reported_once_with_its_outermost_cause():
    peft = {"q_lora_bits": 8, "lora_target_modules": ["a", "b"], "rank_pattern": {"a": 4}}
    found = find_conflicts(TrainingConfig.model_validate({"peft": peft}), Needs())
    assert sorted(item.keys for item in found) == [(f"peft.{key}", "training.use_peft") for key in sorted(peft)]

"""The table is complete, and every row is about something real."""

from dataclasses import fields

import pytest

from framework.build.verify import FIRST_STEP_READERS, READERS
from framework.compose import draft
from framework.memory.ledger import Terms
from framework.memory.levers import LEVERS, every_setting, format_value, lever
from framework.schema.keys import every_key, value_of
from tests.settings import as_config

NAMED_BY_THE_SEEDS = {
    "training": "per_device_train_batch_size gradient_accumulation_steps enable_gradient_checkpointing optimizer "
    "mixed_precision_dtype empty_device_cache_steps compile use_peft",
    "model": "torch_dtype_str attn_implementation enable_liger_kernel model_max_length freeze_layers",
    "peft": "lora_r lora_dropout",
    "fsdp": "enable_fsdp sharding_strategy cpu_offload forward_prefetch backward_prefetch",
}


@pytest.mark.parametrize(
    "key", [f"{section}.{name}" for section, names in NAMED_BY_THE_SEEDS.items() for name in names.split()]
)
def test_every_lever_of_the_seeds_has_a_row(key):
    assert key in every_key()
    assert lever(key)


@pytest.mark.parametrize("row", LEVERS, ids=lambda row: row.key)
def test_a_row_is_about_something_real(row):
    assert row.key in every_key()
    assert row.reader in READERS or row.reader in FIRST_STEP_READERS
    assert set(row.shrinks) <= {term.name for term in fields(Terms)}
    assert row.line.endswith(".")
    assert len(row.settings) > 1
    assert not row.settings[0].time
    assert not row.settings[0].changes
    assert all(setting.time for setting in row.settings[1:])


def test_no_key_has_two_rows_and_no_reader_is_idle():
    keys = [row.key for row in LEVERS]
    assert len(keys) == len(set(keys))
    named = {row.reader for row in LEVERS}
    always = {"head", "parameters", "keeping_blocks", "optimizer_states", "isolation"}
    always |= {"reference", "teacher", "router_loss", "own_loss", "first_adapter"}
    always |= {"parameter_groups", "loss_terms", "embedding_noise", "weights_average"}
    always |= {"vocabulary", "trained_tokens", "rope_scaling"}
    always |= {"adapter_start", "rotated_blocks"}
    assert {*READERS, *FIRST_STEP_READERS} - always == named


@pytest.mark.parametrize(("row", "setting"), list(every_setting()), ids=lambda part: getattr(part, "key", None))
def test_a_setting_is_a_value_of_its_key(row, setting):
    assert format_value(value_of(as_config(row.key, setting), row.key)) == format_value(setting.value)


def test_exactness_is_that_of_the_settings():
    assert lever("training.enable_gradient_checkpointing").exact
    assert not lever("training.optimizer").exact


def test_what_a_lever_needs_can_be_typed(tmp_path) -> None:
    """Every setting with what it needs, in the words that are shown, is read as the same values."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema_version: 1\n")
    for row, setting in every_setting():
        values = {row.key: setting.value, **setting.requires}
        found = draft(str(recipe), [f"{key}={format_value(value)}" for key, value in values.items()]).config
        assert {key: value_of(found, key) for key in values} == values

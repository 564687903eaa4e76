"""The JSON Schema for editors accepts what the tool accepts, and the shipped copy is fresh."""

import json
from typing import Any

import pytest
import yaml

from framework.compose.shipped import GROUPS, presets, recipes
from framework.installation import shipped
from framework.schema.json_schema import recipe_schema

SCHEMA = recipe_schema({group: list(presets(group)) for group in GROUPS})


def test_the_shipped_copy_is_fresh():
    text = (shipped("recipes") / "recipe.schema.json").read_text()
    assert json.loads(text) == SCHEMA, "run: tunesmith schema > recipes/recipe.schema.json"


def test_each_recipe_points_editors_to_it():
    for path in recipes().values():
        assert path.read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n")


def accepts(document: Any) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    return not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(document))


@pytest.mark.parametrize("path", recipes().values(), ids=recipes())
def test_recipes_are_valid(path):
    assert accepts(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "training: {learning_rate: 1e-5, max_steps: '1_000'}",
        "training: {optimizer: PAGED_ADAMW, mixed_precision_dtype: bfloat16, compile: auto}",
        "model: {attn_implementation: flash_attention2, freeze_layers: {append: [a]}}",
        "fsdp: {sharding_strategy: full_shard, backward_prefetch: NO_PREFETCH}",
        "training: {seed: '${training.max_steps}', use_peft: '${fsdp.enable_fsdp}'}",
        "defaults: [{gpu: h100_80gb}, {training: ./mine.yaml}, {gpu: [40gb, 80gb]}]",
    ],
)
def test_other_spellings_are_valid(text):
    assert accepts(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "training: {lerning_rate: 1}",
        "training: {learning_rate: 1e5x}",
        "training: {learning_rate: -1}",
        "training: {seed: 'yes'}",
        "training: {use_peft: 'yes'}",
        "training: {optimizer: adam}",
        "peft: {q_lora_bits: 6}",
        "defaults: [{gpus: a}]",
        "defaults: {gpu: a}",
    ],
)
def test_what_the_tool_refuses_is_invalid(text):
    assert not accepts(yaml.safe_load(text))

"""Tier B of `check`: what it looks at where a search is still to decide."""

import pytest

from framework.checks import check_request
from framework.run.fit import decide
from framework.run.inspect import inspect
from framework.schema.availability import DTYPES, left_open
from framework.schema.keys import every_key, key_at

RECIPE = """
model:
  architecture: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 128}
  load_pretrained_weights: false
  model_max_length: 64
training: {max_steps: 2, global_batch_size: 8}
"""
OPEN = [
    key
    for key in every_key()
    if "auto" in getattr(key_at(tuple(key.split("."))), "choices", ()) and not key.endswith("dtype_str")
    and key not in DTYPES
]  # fmt: skip
COMPANY = {"training.activation_memory_budget": ["training.compile=true"]}
UNSEARCHED = [
    "training.fp8",
    "training.mixed_precision_dtype",
    "training.optimizer_in_backward",
    "training.gradient_checkpointing_policy",
    "training.allocator.max_split_size_mb",
    "training.allocator.garbage_collection_threshold",
    "model.sdpa_backend",
    "model.enable_liger_kernel",
]


def test_these_are_the_levers_of_a_search():
    assert len(OPEN) > 15
    assert not set(OPEN) & set(UNSEARCHED)


@pytest.mark.parametrize("key", OPEN)
def test_a_lever_that_is_open_is_looked_at_with_its_plain_value(key, write):
    report = check_request(write(RECIPE), [f"{key}=auto", "gpu=cpu", *COMPANY.get(key, [])])
    assert report.composition is not None, report.problems
    config = report.composition.config
    assert left_open(config) == (key,)
    assert not inspect(config).problems
    assert left_open(decide(config, runs_here=True).config) == ()


@pytest.mark.parametrize("key", UNSEARCHED)
def test_auto_where_nothing_is_searched_is_refused_in_a_sentence(key, write):
    (problem,) = check_request(write(RECIPE), [f"{key}=auto"]).problems
    assert (problem.key, problem.message) == (key, "cannot be 'auto', which no search decides")

"""The memory strategies of `conf/training`: less memory from one to the next, and nothing else that is trained on."""

import pytest
import yaml

from framework.compose import compose
from framework.installation import shipped
from framework.memory.levers import lever
from framework.run.planning.fit import decide
from framework.run.rehearsal.rehearse import rehearse
from framework.schema.config import TrainingConfig

RECIPE = """training: {global_batch_size: 16, optimizer: adamw_torch_fused}
model:
  load_pretrained_weights: false
  model_max_length: 512
  architecture: {model_type: llama, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 4,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512, vocab_size: 16384}
"""
FIXED = ("balanced", "low_memory", "lowest_memory")


def composed(write, name: str, *arguments: str) -> TrainingConfig:
    return compose(write(RECIPE), [f"training={name}", "gpu=rtx3060_12gb", *arguments]).config


def test_each_takes_less_than_the_one_before(write):
    one_size = ("training.per_device_train_batch_size=8", "training.per_device_eval_batch_size=8")
    balanced = rehearse(composed(write, "balanced", *one_size)).peak.allocated_bytes
    low, lowest = (rehearse(composed(write, name)).peak.allocated_bytes for name in FIXED[1:])
    assert balanced > low > lowest


@pytest.mark.parametrize("name", ["fastest", *FIXED])
def test_a_strategy_sets_levers_that_leave_the_result(name):
    text = yaml.safe_load((shipped("conf") / "training" / f"{name}.yaml").read_text())
    written = [(f"{section}.{key}", value) for section, keys in text.items() for key, value in keys.items()]
    for key, value in written:
        if isinstance(value, dict):
            continue
        settings = [item for item in lever(key).settings if value in (item.value, "auto")]
        assert not any(item.changes for item in settings), key


@pytest.mark.parametrize("name", ["fastest", *FIXED])
def test_a_strategy_keeps_the_global_batch(write, name):
    config = decide(compose(write(RECIPE), [f"training={name}", "gpu=cpu"]).config, runs_here=False).config
    assert config.batch.global_size == 16

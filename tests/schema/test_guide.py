"""The snippets of the out-of-memory guide (seed 004) construct with only their import lines changed."""

import re
from pathlib import Path

import pytest

import framework
from framework.schema.config import TrainingConfig

SEEDS = Path(__file__).parents[2].parent / "shared" / "seeds"
HEAD = "from oumi.core.configs import TrainingConfig, TrainingParams\n"
GUIDE = [
    HEAD
    + "config = TrainingConfig(training=TrainingParams(per_device_train_batch_size=8, gradient_accumulation_steps=4))",
    "config = TrainingConfig(training=TrainingParams(\n"
    '    enable_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}))',
    'config = TrainingConfig(training=TrainingParams(optimizer="adamw_torch_fused"))',
    'config = TrainingConfig(training=TrainingParams(mixed_precision_dtype="bf16"))',
    'config = TrainingConfig(model=ModelParams(torch_dtype_str="bfloat16"))',
    "config = TrainingConfig(training=TrainingParams(empty_device_cache_steps=50))",
    'config = TrainingConfig(training=TrainingParams(optimizer="paged_adamw_32bit"))',
    'config = TrainingConfig(model=ModelParams(attn_implementation="sdpa"))',
    'config = TrainingConfig(model=ModelParams(attn_implementation="flash_attention2"))',
    "config = TrainingConfig(training=TrainingParams(compile=True))",
    "from oumi.core.configs import ModelParams\nconfig = TrainingConfig(model=ModelParams(enable_liger_kernel=True))",
    "config = TrainingConfig(model=ModelParams(model_max_length=2048))",
    'config = TrainingConfig(model=ModelParams(freeze_layers=["layer.0", "layer.1", "layer.2"]))',
    'config = TrainingConfig(model=ModelParams(attn_implementation="ring_attention"))',
    "from oumi.core.configs import PeftParams\n"
    "config = TrainingConfig(\n"
    "    training=TrainingParams(use_peft=True), peft=PeftParams(lora_r=16, lora_alpha=32, lora_dropout=0.05))",
    "from oumi.core.configs import FSDPParams\n"
    "from oumi.core.configs.params.fsdp_params import ShardingStrategy\n"
    "config = TrainingConfig(\n"
    "    fsdp=FSDPParams(enable_fsdp=True, sharding_strategy=ShardingStrategy.FULL_SHARD))",
    "config = TrainingConfig(fsdp=FSDPParams(enable_fsdp=True, cpu_offload=True))",
    "config = TrainingConfig(fsdp=FSDPParams(enable_fsdp=True, forward_prefetch=False))",
    "config = TrainingConfig(fsdp=FSDPParams(enable_fsdp=True, backward_prefetch=BackwardPrefetch.NONE))",
]
"""The guide's structure, for where the seed is absent. Its snippets use names that earlier ones, or none, imported."""


def run(snippet: str) -> TrainingConfig:
    names: dict[str, object] = {}
    exec("from framework import *", names)
    exec(re.sub(r"from oumi\.core\.configs[\w.]* import", "from framework import", snippet), names)
    config = names["config"]
    assert isinstance(config, TrainingConfig)
    return config


@pytest.mark.parametrize("snippet", GUIDE, ids=range(len(GUIDE)))
def test_each_snippet_constructs(snippet):
    assert run(snippet) != TrainingConfig()


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the seeds are not next to this checkout")
def test_the_seed_itself():
    text = next(SEEDS.glob("004_*.txt")).read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.S | re.M)
    snippets = [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in blocks]
    assert len(snippets) == 18
    assert all(isinstance(run(snippet), TrainingConfig) for snippet in snippets)


def test_what_the_guide_says_lands_where_it_should():
    assert run(GUIDE[0]).batch.global_size == 32
    assert run(GUIDE[8]).model.attn_implementation == "flash_attention_2"
    assert run(GUIDE[18]).fsdp.backward_prefetch is framework.BackwardPrefetch.NONE


def test_public_names_exist():
    assert {name for name in framework.__all__ if not hasattr(framework, name)} == set()
    assert set(framework.__all__) <= set(dir(framework))
    with pytest.raises(AttributeError):
        _ = framework.nothing

"""What is refused beside sharded weights, and what works instead."""

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules import Needs, find_conflicts
from framework.schema.sharding_rules import SHARDED_OPTIMIZERS
from tests.tiny import LLAMA

MODEL = {"architecture": LLAMA, "load_pretrained_weights": False, "torch_dtype_str": "float32"}
SHARDED = {"enable_fsdp": True}
ADAPTED = {"use_peft": True}


def conflicts(count=2, fsdp=SHARDED, **sections):
    gpu = {"name": "h100_80gb", "capability": "9.0", "count": count}
    model = {**MODEL, **sections.pop("model", {})}
    config = TrainingConfig.model_validate({"model": model, "gpu": gpu, "fsdp": fsdp, **sections})
    return {found.keys[0]: found for found in find_conflicts(config, Needs()) if not found.is_warning}


def test_one_device_has_nothing_to_split():
    assert "gpu.count" in conflicts(count=1)["fsdp.enable_fsdp"].keys
    assert not conflicts()


@pytest.mark.parametrize(
    ("sections", "key", "works"),
    [
        ({"training": {"optimizer": "adamw_8bit"}}, "training.optimizer", "adamw_torch_fused"),
        ({"training": {"optimizer": "adafactor"}}, "training.optimizer", "lion"),
        ({"training": {"optimizer": "galore_adamw"}}, "training.optimizer", "adamw_torch_fused"),
        ({"training": {"optimizer_offload": "host"}}, "training.optimizer_offload", "fsdp.cpu_offload=true"),
        ({"training": {"mixed_precision_dtype": "fp16"}}, "training.mixed_precision_dtype", "bf16"),
        ({"training": {"compile": True, "compile_scope": "model"}}, "training.compile_scope", "block"),
        ({"training": {"fp8": "tensorwise", "compile": True}}, "training.fp8", "none"),
        ({"training": ADAPTED, "peft": {"q_lora": True}}, "peft.q_lora", "enable_fsdp: false"),
        ({"training": ADAPTED, "peft": {"peft_save_mode": "merged"}}, "peft.peft_save_mode", "adapter_only"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_sharded_is_refused_with_what_can(sections, key, works):
    """F01, F02."""
    found = conflicts(**sections)[key]
    assert "fsdp.enable_fsdp" in found.keys
    assert works in found.expected


@pytest.mark.parametrize("name", ["cpu_offload", "forward_prefetch"])
def test_replicas_gather_nothing(name):
    assert f"fsdp.{name}" in conflicts(fsdp={**SHARDED, "sharding_strategy": "NO_SHARD", name: True})


def test_every_optimizer_is_either_tried_or_refused():
    for choice in SHARDED_OPTIMIZERS:
        found = conflicts(training={"optimizer": str(choice)}).get("training.optimizer")
        assert found is None or "fsdp.enable_fsdp" not in found.keys

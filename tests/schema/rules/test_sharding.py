"""Settings refused with sharded weights, and alternatives."""

import pytest

from framework.memory.resolve import describe_float16, resolve
from framework.schema.config import TrainingConfig
from framework.schema.fsdp import FSDPParams
from framework.schema.optimizers import FACTS
from framework.schema.rules.every import Needs, find_conflicts, find_derived_conflicts
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
        ({"training": ADAPTED, "peft": {"q_lora": True, "q_lora_bits": 8}}, "peft.q_lora_bits", "4, or "),
        ({"training": ADAPTED, "peft": {"q_lora": True, "peft_method": "dora"}}, "peft.peft_method", "lora or rslora"),
        ({"training": ADAPTED, "peft": {"q_lora": True, "peft_method": "ia3"}}, "peft.peft_method", "lora or rslora"),
        (
            {"training": {**ADAPTED, "mixed_precision_dtype": "bf16"}, "peft": {"peft_method": "vera"}},
            "peft.peft_method",
            "lora, or none",
        ),
        ({"training": ADAPTED, "peft": {"peft_save_mode": "merged"}}, "peft.peft_save_mode", "adapter_only"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_sharded_is_refused_with_what_can(sections, key, works):
    found = conflicts(**sections)[key]
    assert "fsdp.enable_fsdp" in found.keys
    assert works in found.expected


@pytest.mark.parametrize(
    ("held", "count", "adamw"), [("float32", 2, "3.7"), ("bfloat16", 2, "1.9"), ("float32", 8, "0.9")]
)
def test_what_can_be_sharded_depends_on_its_states(held, count, adamw):
    """Float32 weights have two moments of 4 bytes, 8e9 bytes of a billion weights: 7.45 GiB over the devices."""
    found = conflicts(count, training={"optimizer": "paged_adamw_8bit"}, model={"torch_dtype_str": held})
    assert f"adamw_torch_fused ({adamw} GiB" in found["training.optimizer"].expected


def packed(mixed, adapter=None, base="bfloat16"):
    return {
        "model": {"torch_dtype_str": base},
        "training": {**ADAPTED, "mixed_precision_dtype": mixed},
        "peft": {"q_lora": True, "adapter_dtype": adapter},
    }


@pytest.mark.parametrize(
    ("mixed", "adapter", "base", "derived"),
    [
        ("none", None, "bfloat16", "auto"),
        ("none", "bfloat16", "bfloat16", "bfloat16"),
        ("none", None, "float32", "auto"),
        ("bf16", None, "bfloat16", None),
        ("bf16", None, "float32", None),
        ("bf16", "float32", "bfloat16", "float32"),
        ("bf16", "bfloat16", "float32", "bfloat16"),
    ],
)
def test_packed_weights_and_adapter_are_gathered_in_one_dtype_that_one_key_says(mixed, adapter, base, derived):
    """Under autocast a unit is gathered in its dtype, whatever the adapter's part is held in."""
    assert not conflicts(**packed(mixed, adapter, base))
    gpu = {"name": "h100_80gb", "capability": "9.0", "count": 2}
    sections = packed(mixed, adapter, base)
    config = TrainingConfig.model_validate({**sections, "gpu": gpu, "fsdp": SHARDED})
    assert resolve(config).peft.adapter_dtype == derived
    assert resolve(config.model_copy(update={"fsdp": FSDPParams()})).peft.adapter_dtype == adapter


def test_a_written_adapter_dtype_that_clashes_is_refused_and_not_changed():
    found = conflicts(**packed("none", "float32"))["peft.adapter_dtype"]
    assert "peft.q_lora" in found.keys
    assert "bf16" in found.expected
    unread = TrainingConfig.model_validate({**packed("none", "float32", "auto"), "fsdp": SHARDED})
    assert not [item for item in find_derived_conflicts(unread) if item.keys[0] == "peft.adapter_dtype"]
    read = resolve(unread, {"dtype": "bfloat16", "max_position_embeddings": 128})
    assert "peft.adapter_dtype" in [item.keys[0] for item in find_derived_conflicts(read)]


@pytest.mark.parametrize(
    ("count", "sections"),
    [
        (2, {"fsdp": SHARDED}),
        (2, {"fsdp": {"tensor_parallel_size": 2}}),
        (1, {"training": {"optimizer_in_backward": True, "max_grad_norm": 0}}),
    ],
)
def test_float16_is_no_default_where_a_rule_refuses_it(count, sections):
    """A card without bfloat16 has float16 autocast by default, whose loss scale these cannot keep."""
    gpu = {"name": "t4_16gb", "capability": "7.5", "count": count}
    asked = TrainingConfig.model_validate({"gpu": gpu, **sections})
    assert not [item for item in find_conflicts(asked, Needs()) if not item.is_warning]
    derived = resolve(asked)
    assert derived.training.mixed_precision_dtype == "none"
    assert not find_derived_conflicts(derived)
    (assumptions,) = describe_float16(derived, {})
    assert assumptions.startswith("computed in float32 without autocast, which is slower")
    training = {**sections.get("training", {}), "mixed_precision_dtype": "fp16"}
    written = TrainingConfig.model_validate({"gpu": gpu, **sections, "training": training})
    (found,) = find_derived_conflicts(resolve(written))
    assert found.keys[0] == "training.mixed_precision_dtype"
    assert found.expected == "none (this card has no bfloat16)"


@pytest.mark.parametrize("name", ["cpu_offload", "forward_prefetch"])
def test_replicas_gather_nothing(name):
    assert f"fsdp.{name}" in conflicts(fsdp={**SHARDED, "sharding_strategy": "NO_SHARD", name: True})


def test_every_optimizer_is_either_tried_or_refused():
    for choice in (choice for choice, facts in FACTS.items() if facts.shards.is_sharded):
        found = conflicts(training={"optimizer": str(choice)}).get("training.optimizer")
        assert found is None or "fsdp.enable_fsdp" not in found.keys

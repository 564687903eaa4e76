"""The rows of benchmarks/sharded.py as configs, which need no card."""

from collections.abc import Mapping
from typing import Any

from framework import load
from framework.schema.config import TrainingConfig

_1B = {"model": "llama3.2_1b", "micro": 4, "gc": True}
_8B_LORA = {"model": "llama3.1_8b", "micro": 2, "gc": True, "dtype": "bfloat16", "lora": "lora"}
_QLORA: dict[str, Any] = {**_8B_LORA, "lora": "qlora"}
ROWS: tuple[dict[str, Any], ...] = (
    {"name": "1b-gc", **_1B},
    {"name": "1b", **_1B, "gc": False},
    {"name": "1b-zero2", **_1B, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    {"name": "1b-bf16-gc", **_1B, "dtype": "bfloat16"},
    {"name": "1b-chunked", **_1B, "gc": False, "changes": ["model.chunked_loss=1024"]},
    {"name": "1b-prefetch", **_1B, "fsdp": {"forward_prefetch": True}},
    {"name": "1b-no-prefetch", **_1B, "fsdp": {"backward_prefetch": "NONE"}},
    {"name": "1b-post-prefetch", **_1B, "fsdp": {"backward_prefetch": "BACKWARD_POST"}},
    {"name": "1b-offload", **_1B, "fsdp": {"cpu_offload": True}},
    {"name": "1b-accumulated", **_1B, "micro": 2, "accumulation": 3},
    {"name": "1b-ddp", **_1B, "fsdp": {"sharding_strategy": "NO_SHARD"}},
    {"name": "3b-gc", "model": "llama3.2_3b", "micro": 2, "gc": True},
    {"name": "8b-gc-chunked", "model": "llama3.1_8b", "micro": 1, "gc": True, "changes": ["model.chunked_loss=1024"]},
    {"name": "8b-lora-gc", **_8B_LORA},
    {"name": "8b-qlora-gc", **_QLORA},
    {"name": "8b-qlora-gc-zero2", **_QLORA, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    {"name": "8b-qlora-gc-ddp", **_QLORA, "fsdp": {"sharding_strategy": "NO_SHARD"}},
    {"name": "8b-qlora-masters-gc", **_QLORA, "autocast": "bf16", "adapter": "float32"},
    {"name": "qwen3-1.7b-gc", "model": "qwen3_1.7b", "micro": 2, "gc": True},
)
_RING: dict[str, Any] = {
    "changes": ["model.chunked_loss=1024", "model.attn_implementation=ring_attention"],
    "ring": True,
}
_LONG = {**_1B, "micro": 1, "tokens": 32768}
_LONG_LORA = {**_8B_LORA, "micro": 1}
ROWS += (
    {"name": "1b-32k", **_LONG, "changes": ["model.chunked_loss=1024"]},
    {"name": "1b-32k-ring", **_LONG, **_RING},
    {"name": "1b-16k-ring-plain", **_LONG, **_RING, "tokens": 16384, "gc": False},
    {"name": "8b-lora-64k-ring", **_LONG_LORA, **_RING, "tokens": 65536},
    {"name": "1b-32k-ring-cudnn", **_LONG, **_RING, "changes": [*_RING["changes"], "model.sdpa_backend=cudnn"]},
)
"""Long rows: the same number on each card, and one shared by all cards (context parallel)."""
_TENSOR: dict[str, Any] = {"fsdp": {"enable_fsdp": False, "tensor_parallel_size": 2}}
ROWS += (
    {"name": "1b-tp2", **_1B, **_TENSOR},
    {"name": "1b-tp2-plain", **_1B, **_TENSOR, "gc": False, "changes": ["model.chunked_loss=1024"]},
    {"name": "1b-tp2-bf16", **_1B, **_TENSOR, "dtype": "bfloat16"},
    {"name": "8b-lora-tp2", **_8B_LORA, **_TENSOR},
    {"name": "1b-tp2-full", **_1B, "fsdp": {"tensor_parallel_size": 2}, "cards": 4},
)
"""Tensor parallel over two cards: the same rows, and on four cards with shards over two groups."""
_CURVE = {"steps": 50, "world": True}
CURVES: tuple[dict[str, Any], ...] = (
    {"name": "curve-one", **_CURVE, "world": False},
    {"name": "curve-full", **_CURVE, "fsdp": {}},
    {"name": "curve-zero2", **_CURVE, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    {"name": "curve-offload", **_CURVE, "fsdp": {"cpu_offload": True}},
    {"name": "curve-post", **_CURVE, "fsdp": {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True}},
    {"name": "curve-ddp", **_CURVE, "fsdp": None},
    {"name": "curve-ring", **_CURVE, "fsdp": None, "ring": True},
    {"name": "curve-ring-full", **_CURVE, "fsdp": {}, "ring": True},
    {"name": "curve-tp", **_CURVE, "fsdp": {"enable_fsdp": False, "tensor_parallel_size": 2}},
    {"name": "curve-tp-full", **_CURVE, "fsdp": {"tensor_parallel_size": 2}, "cards": 4},
    {"name": "curve-qlora-one", **_CURVE, "world": False, "qlora": True},
    {"name": "curve-qlora-full", **_CURVE, "fsdp": {}, "qlora": True},
    {"name": "curve-qlora-zero2", **_CURVE, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}, "qlora": True},
    {"name": "curve-qlora-offload", **_CURVE, "fsdp": {"cpu_offload": True}, "qlora": True},
    {"name": "curve-qlora-copies", **_CURVE, "fsdp": {"sharding_strategy": "NO_SHARD"}, "qlora": True},
    {"name": "curve-dora-one", **_CURVE, "world": False, "dora": True},
    {"name": "curve-dora-full", **_CURVE, "fsdp": {}, "dora": True},
    {"name": "curve-dora-zero2", **_CURVE, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}, "dora": True},
    {"name": "curve-moe-one", **_CURVE, "world": False, "moe": True},
    {"name": "curve-moe-full", **_CURVE, "fsdp": {}, "moe": True},
    {"name": "curve-moe-zero2", **_CURVE, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}, "moe": True},
)


def curve_of_one_card(row: Mapping[str, Any]) -> str:
    """The name of the curve that a row's curve is compared with."""
    return next((f"curve-{what}-one" for what in ("qlora", "dora", "moe") if row.get(what)), "curve-one")


def step_config(row: dict[str, Any], world: int, card: str = "h100_80gb") -> TrainingConfig:
    """The config of a row on `world` cards."""
    dtype, accumulation = row.get("dtype", "float32"), row.get("accumulation", 1)
    lora = [f"peft={row.get('lora')}", "peft.lora_r=16", "peft.lora_alpha=32"]
    lora += [f"peft.adapter_dtype={row.get('adapter', 'bfloat16')}"]
    changes = [f"model={row['model']}", f"gpu={card}", f"gpu.count={world}"]
    fsdp = {"enable_fsdp": True, **row.get("fsdp", {})}
    changes += [f"fsdp.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in fsdp.items()]
    changes += [f"model.torch_dtype_str={dtype}", f"training.enable_gradient_checkpointing={str(row['gc']).lower()}"]
    autocast = row.get("autocast", "bf16" if dtype == "float32" else "none")
    changes += [f"training.mixed_precision_dtype={autocast}"]
    changes += [f"training.per_device_train_batch_size={row['micro']}", "model.load_pretrained_weights=false"]
    groups = 1 if row.get("ring") else world // fsdp.get("tensor_parallel_size", 1)
    changes += [f"training.global_batch_size={row['micro'] * accumulation * groups}", "data.eval_fraction=0"]
    changes += [f"model.model_max_length={row.get('tokens', 2048)}", "training.optimizer=adamw_torch_fused"]
    changes += ["training.learning_rate=1e-4"]
    changes += ["model.chunked_loss=false", *row.get("changes", ())]
    return load("finetune_local", overrides=[*changes, *(lora if row.get("lora") else ["training.use_peft=false"])])


def curve_config(row: Mapping[str, Any], world: int, weights: str | None = None) -> TrainingConfig:
    """A small model in bf16, 8 rows per step on any number of cards, with random weights or those in a folder."""
    world = world if row["world"] else 1
    architecture: dict[str, Any] = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1536}
    architecture |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}
    if row.get("moe"):
        architecture |= {"model_type": "qwen3_moe", "num_hidden_layers": 4, "head_dim": 64, "num_experts": 8}
        architecture |= {"moe_intermediate_size": 512, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    architecture |= row.get("shape", {})
    training = {"per_device_train_batch_size": 2, "global_batch_size": 8, "learning_rate": 3e-4}
    training |= {"mixed_precision_dtype": "bf16", "optimizer": "adamw_torch_fused", "warmup_steps": 10}
    random = {"architecture": architecture, "load_pretrained_weights": False}
    start = {"model_name": weights} if weights else random
    sections: dict[str, Any] = {
        "model": {"torch_dtype_str": "float32", **start},
        "training": training,
        "gpu": {"name": "h100_80gb", "capability": "9.0", "count": world},
    }
    if row.get("qlora"):  # by loftq, whose adapters start from the weights: the same on any number of cards
        sections["training"] |= {"use_peft": True, "learning_rate": 3e-3}
        adapter = {"peft_method": "loftq", "lora_r": 16, "lora_alpha": 16, "lora_target_modules": ["all-linear"]}
        sections["peft"] = {**adapter, "q_lora": True, "use_bnb_nested_quant": True}
    if row.get("dora"):
        sections["training"] |= {"use_peft": True, "learning_rate": 3e-3}
        adapter = {"peft_method": "dora", "lora_r": 16, "lora_alpha": 16, "lora_target_modules": ["all-linear"]}
        sections["peft"] = adapter
    if row.get("ring"):
        sections["model"]["attn_implementation"] = "ring_attention"
    if row.get("fsdp") is not None:
        sections["fsdp"] = {"enable_fsdp": True, **row["fsdp"]}
    return TrainingConfig.model_validate(sections)

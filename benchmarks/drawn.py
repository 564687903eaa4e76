"""Randomly drawn rows: models of random shapes with pairs and triples of levers, by a seed. No torch.

A row is `{"name": ..., "sections": ...}`, with the sections of a `TrainingConfig`; its card is given by name. Some rows
contradict themselves: the reason for their refusal is recorded, and they are counted.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

from framework.memory.cards import read_card
from framework.schema.config import TrainingConfig

CARD = "h200_141gb"
Sections = dict[str, dict[str, Any]]
Row = dict[str, Any]
BLOCKS = {"gpt2": "h"}


def config_of(row: Mapping[str, Any]) -> TrainingConfig:
    """The row's config. Raises ValueError if it contradicts itself."""
    sections = {**row["sections"]}
    sections["gpu"] = {**read_card(CARD), **sections.get("gpu", {})}
    return TrainingConfig.model_validate(sections)


def _llama(draw: random.Random, size: str) -> dict[str, Any]:
    heads = draw.choice({"small": (12, 14, 16), "large": (20, 24, 32)}[size])
    shape = {
        "model_type": draw.choice(("llama", "qwen3", "mistral")),
        "hidden_size": 64 * heads,
        "intermediate_size": 64 * heads * draw.choice((5, 6, 7, 8)) // 2,
        "num_hidden_layers": draw.choice((8, 10, 14, 18)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((heads, heads // 2, 2)),
        "vocab_size": draw.choice((32000, 49152, 100352, 151936)),
        "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 32768,
    }
    return shape | ({"head_dim": draw.choice((64, 128))} if shape["model_type"] == "qwen3" else {})


def _gemma(draw: random.Random, size: str) -> dict[str, Any]:
    heads = {"small": 4, "large": 8}[size]
    shape = {
        "model_type": draw.choice(("gemma2", "gemma3_text")),
        "hidden_size": 256 * heads,
        "intermediate_size": 1024 * heads,
        "num_hidden_layers": draw.choice((6, 10, 14)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, heads // 2)),
        "head_dim": draw.choice((128, 256)),
        "vocab_size": draw.choice((64000, 256000)),
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    return shape


def _gpt2(draw: random.Random, size: str) -> dict[str, Any]:
    heads = draw.choice({"small": (10, 12), "large": (16, 20)}[size])
    return {
        "model_type": "gpt2",
        "n_embd": 64 * heads,
        "n_layer": draw.choice((8, 12, 20)),
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 50257,
    }


def _encoder(draw: random.Random, size: str) -> dict[str, Any]:
    heads = draw.choice({"small": (8, 12), "large": (12, 16)}[size])
    shape = {
        "hidden_size": 64 * heads,
        "intermediate_size": draw.choice((2, 3, 4)) * 64 * heads,
        "num_hidden_layers": draw.choice((8, 12, 18)),
        "num_attention_heads": heads,
        "vocab_size": draw.choice((30522, 50368)),
        "pad_token_id": 0,
    }
    if draw.random() < 0.5:
        return {"model_type": "bert", "max_position_embeddings": 2048, **shape}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return {"model_type": "modernbert", "max_position_embeddings": 8192, **ends, **shape}


def _moe(draw: random.Random, size: str) -> dict[str, Any]:
    heads = {"small": 12, "large": 16}[size]
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 64 * heads,
        "intermediate_size": 128 * heads,
        "moe_intermediate_size": draw.choice((384, 512, 768)),
        "num_hidden_layers": draw.choice((6, 8, 12)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((2, 4)),
        "head_dim": 64,
        "vocab_size": draw.choice((32000, 151936)),
        "num_experts": draw.choice((8, 16, 32)),
        "num_experts_per_tok": draw.choice((2, 4)),
        "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 32768,
    }


FAMILIES: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "llama": _llama,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "encoder": _encoder,
    "moe": _moe,
}
PRECISIONS = {"amp": ("float32", "bf16"), "bf16": ("bfloat16", "none"), "fp32": ("float32", "none")}
OPTIMIZERS = (
    *("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "sgd", "adafactor"),
    *("lion", "lion_8bit", "paged_lion_8bit", "anyprecision_adamw", "schedule_free_adamw"),
)
LEVERS: dict[str, Callable[[random.Random], tuple[str, str, Any]]] = {
    "checkpoints": lambda draw: ("training", "enable_gradient_checkpointing", True),
    "compile": lambda draw: ("training", "compile", True),
    "liger": lambda draw: ("model", "enable_liger_kernel", True),
    "chunks": lambda draw: ("model", "chunked_loss", draw.choice((256, 1024, True))),
    "whole-loss": lambda draw: ("model", "chunked_loss", False),
    "accumulation": lambda draw: ("training", "gradient_accumulation_steps", draw.choice((2, 3))),
    "activation-offload": lambda draw: ("training", "activation_offload", True),
    "freeze": lambda draw: ("model", "freeze_first_blocks", draw.choice((2, 4))),
    "in-backward": lambda draw: ("training", "optimizer_in_backward", True),
    "states-on-host": lambda draw: ("training", "optimizer_offload", "host"),
    "expandable": lambda draw: ("training", "allocator", {"expandable_segments": True}),
}


def _sections(draw: random.Random, family: str, size: str, precision: str) -> Sections:
    dtype, autocast = PRECISIONS[precision]
    architecture = FAMILIES[family](draw, size)
    longest = architecture.get("n_positions") or architecture["max_position_embeddings"]
    tokens = draw.choice([count for count in (256, 512, 1024, 1536, 2048, 4096) if count <= longest])
    rows = draw.choice([count for count in (1, 2, 3, 4, 6, 8) if count * tokens <= 8192])
    training = {"per_device_train_batch_size": rows, "max_steps": 1000, "mixed_precision_dtype": autocast}
    training |= {"gradient_accumulation_steps": 1, "optimizer": "adamw_torch_fused"}
    if family == "encoder":
        training["task"] = "classification"
    model = {"architecture": architecture, "load_pretrained_weights": False, "torch_dtype_str": dtype}
    return {"training": training, "model": model | {"model_max_length": tokens}}


def _use(sections: Sections, draw: random.Random, *levers: str) -> None:
    for lever in levers:
        section, key, value = LEVERS[lever](draw)
        sections[section][key] = value
        if lever == "in-backward":
            sections["training"]["max_grad_norm"] = 0


def _adapt(sections: Sections, draw: random.Random, method: str, **peft: Any) -> None:
    sections["training"]["use_peft"] = True
    sections["peft"] = {"peft_method": method, **peft}
    if method not in ("prefix", "prompt"):
        rank = draw.choice((4, 16, 64))
        linear: dict[str, Any] = {"lora_target_modules": ["all-linear"]} if draw.random() < 0.5 else {}
        sections["peft"] |= {"lora_r": rank, "lora_alpha": 2.0 * rank, **linear}
        sections["peft"] |= {"lora_dropout": 0.05} if draw.random() < 0.3 else {}


def _full(draw: random.Random, number: int) -> tuple[str, Sections]:
    family = list(FAMILIES)[number % len(FAMILIES)]
    precision = draw.choice(("amp", "bf16", "amp", "bf16", "fp32"))
    sections = _sections(draw, family, "small", precision)
    sections["training"]["optimizer"] = draw.choice(OPTIMIZERS)
    levers = draw.sample(list(LEVERS), draw.choice((1, 2, 2)))
    _use(sections, draw, *levers)
    return "-".join((family, precision, sections["training"]["optimizer"], *levers)), sections


def _lora(draw: random.Random, number: int) -> tuple[str, Sections]:
    family = draw.choice(("llama", "gemma", "gpt2", "moe", "encoder"))
    sections = _sections(draw, family, "large", draw.choice(("bf16", "bf16", "amp")))
    method = draw.choice(("lora", "dora", "rslora", "pissa", "vera", "ia3", "prefix", "prompt"))
    _adapt(sections, draw, method)
    levers = draw.sample(("checkpoints", "compile", "liger", "chunks", "accumulation"), draw.choice((1, 2)))
    _use(sections, draw, *levers)
    return "-".join((family, method, *levers)), sections


def _qlora(draw: random.Random, number: int) -> tuple[str, Sections]:
    family = draw.choice(("llama", "llama", "gemma", "gpt2"))
    sections = _sections(draw, family, "large", draw.choice(("bf16", "bf16", "amp")))
    method = ("lora", "dora", "lora")[number % 3]
    _adapt(sections, draw, method, q_lora=True, use_bnb_nested_quant=draw.random() < 0.5)
    sections["training"]["optimizer"] = draw.choice(("adamw_torch_fused", "paged_adamw_8bit", "adamw_8bit"))
    levers = ("compile",) if number % 4 == 1 else ("liger",) if number % 4 == 2 else ()
    levers += ("checkpoints",) if draw.random() < 0.6 else ()
    _use(sections, draw, *levers)
    return "-".join((family, "4bit", method, sections["training"]["optimizer"], *levers)), sections


def _odd(draw: random.Random, number: int) -> tuple[str, Sections]:
    """Pairs found to be surprising: a prefix, experts or paged states in compiled code."""
    what = ("prefix", "experts", "paged")[number % 3]
    family = {"prefix": "llama", "experts": "moe"}.get(what) or draw.choice(("llama", "encoder", "gpt2", "gemma"))
    precision = "amp" if what == "experts" else draw.choice(("amp", "bf16"))
    sections = _sections(draw, family, "small", precision)
    if what == "prefix":
        _adapt(sections, draw, "prefix")
    if what == "paged":
        sections["training"]["optimizer"] = draw.choice(("paged_adamw_32bit", "paged_adamw_8bit"))
    _use(sections, draw, "compile", *(("checkpoints",) if what != "prefix" and draw.random() < 0.3 else ()))
    return f"{family}-{what}-{precision}-compile", sections


def _task(draw: random.Random, number: int) -> tuple[str, Sections]:
    family, task = draw.choice(("llama", "gpt2", "gemma")), ("preference", "reward", "pretrain")[number % 3]
    sections = _sections(draw, family, "small", draw.choice(("amp", "bf16")))
    sections["training"]["task"] = task
    if task == "preference":
        sections["training"]["preference"] = {"loss_type": draw.choice(("dpo", "orpo", "simpo"))}
    if draw.random() < 0.5:
        _adapt(sections, draw, "lora")
    levers = draw.sample(("checkpoints", "compile", "accumulation"), 1)
    _use(sections, draw, *levers)
    return "-".join((family, task, *levers)), sections


SINGLE: dict[str, tuple[Callable[[random.Random, int], tuple[str, Sections]], int]] = {
    "qlora": (_qlora, 24),
    "odd": (_odd, 9),
    "full": (_full, 28),
    "lora": (_lora, 14),
    "task": (_task, 9),
}
"""Classes of one-card rows: how each is drawn, and how many."""


def _sharded(draw: random.Random, number: int) -> tuple[str, Sections]:
    family = draw.choice(("llama", "llama", "llama", "gemma", "gpt2", "moe"))
    precision = draw.choice(("amp", "amp", "bf16"))
    way = ("FULL_SHARD", "SHARD_GRAD_OP", "ring", "tensor", "NO_SHARD", "FULL_SHARD", "qlora", "copies")[number % 8]
    family = "llama" if way in ("ring", "tensor", "qlora") else family
    sections = _sections(draw, family, draw.choice(("small", "large")), precision)
    sections["gpu"] = {"count": 2}
    fsdp = {"enable_fsdp": True}
    levers = draw.sample(("checkpoints", "chunks", "accumulation", "whole-loss"), draw.choice((1, 2)))
    parts = [family, way, precision]
    if way == "ring":
        sections["model"] |= {"attn_implementation": "ring_attention", "model_max_length": draw.choice((4096, 8192))}
        sections["training"]["per_device_train_batch_size"] = 1
        fsdp["enable_fsdp"] = draw.random() < 0.6
    elif way == "tensor":
        fsdp |= {"enable_fsdp": False, "tensor_parallel_size": 2}
    elif way == "copies":
        fsdp["enable_fsdp"] = False
    elif way != "qlora":
        fsdp["sharding_strategy"] = way
    if way == "qlora":
        fsdp["sharding_strategy"] = draw.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
        _adapt(sections, draw, "lora", q_lora=True, use_bnb_nested_quant=draw.random() < 0.5)
    elif draw.random() < 0.3:
        _adapt(sections, draw, draw.choice(("lora", "dora") if way != "tensor" else ("lora",)))
        parts.append(sections["peft"]["peft_method"])
    if fsdp["enable_fsdp"] and way == "FULL_SHARD" and draw.random() < 0.6:
        key, value = draw.choice((("cpu_offload", True), ("forward_prefetch", True), ("backward_prefetch", "NONE")))
        fsdp[key] = value
        parts.append(key)
    if way in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "copies") and draw.random() < 0.2:
        levers.append("compile")
    _use(sections, draw, *levers)
    sections["fsdp"] = fsdp
    return "-".join((*parts, *levers)), sections


SHARDED = {"sharded": (_sharded, 56)}


def drawn(kind: str, seed: int) -> list[Row]:
    """The rows for one card (`single`) or two (`sharded`)."""
    rows = []
    for name, (make, count) in {"single": SINGLE, "sharded": SHARDED}[kind].items():
        draw = random.Random(f"{seed} {name}")
        for number in range(count):
            parts, sections = make(draw, number)
            rows.append({"name": f"{name}-{number:02d}-{parts}", "sections": sections})
    return rows

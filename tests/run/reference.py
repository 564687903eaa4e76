"""The step that the rows of tests/calibration were measured with, on tensors without storage.

Models are built from the same configs, and the step is `model(labels=...)`, backward, clip, optimizer,
zero_grad, so that the fake device, tracking and replaying can be tested without the product's own step.
"""

import contextlib
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from framework.memory.allocator import CachingAllocator, Peak, replay
from framework.memory.trace import Kind, Trace
from framework.run.rehearsal.fake_device import fake_device
from framework.run.rehearsal.tracker import Tracker
from framework.schema.gpu import GPUParams

H100 = GPUParams(
    name="h100_80gb",
    capacity_bytes=85017493504,
    usable_bytes=85017493504,
    capability="9.0",
    multiprocessors=132,
    bandwidth_bytes_per_second=3.35e12,
    fp32_flops=66.9e12,
    tf32_flops=494.7e12,
    bf16_flops=989.4e12,
    fp16_flops=989.4e12,
    context_bytes=767 * 2**20,
    cublas_workspace_bytes=32 * 2**20,
)
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-1b": _LLAMA
    | {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "llama-3b": _LLAMA
    | {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    | {"num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    "llama-8b": _LLAMA
    | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False},
    "qwen3-0.6b": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    | {"tie_word_embeddings": True, "max_position_embeddings": 40960},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 8192,
    },
    "bert-base": {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 4096},
    "moe-1b": {"model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 768}
    | {"num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    | {"vocab_size": 151936, "num_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": True}
    | {"norm_topk_prob": True, "max_position_embeddings": 40960},
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Row = Mapping[str, Any]


def build_model(row: Row) -> torch.nn.Module:
    """The model of a measured row on meta, frozen, adapted and checkpointed as it says."""
    architecture = dict(MODELS[row["model"]])
    if "layers" in row:
        architecture["num_hidden_layers"] = row["layers"]
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    config.use_cache = False
    causal = row["task"] == "causal_lm"
    if not causal:
        config.num_labels = 2
    options = {"experts_implementation": row["experts"]} if "moe" in row["model"] else {}
    factory = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = factory.from_config(config, dtype=_DTYPES[row["dtype"]], attn_implementation=row["attn"], **options)
    for name, parameter in model.named_parameters():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), row["freeze"])
        if layer < row["freeze"] or (row["freeze"] and any(part in name for part in ("embed", ".wte", ".wpe"))):
            parameter.requires_grad_(False)
    if row["lora"]:
        model = _adapt(model, row, causal)
    if row["gc"]:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # since 5.2x
        enable({"use_reentrant": False})
        if row["lora"]:
            model.enable_input_require_grads()
    return model.train()


def _adapt(model: torch.nn.Module, row: Row, causal: bool) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    options = dict(row["lora"])
    cast = options.pop("autocast_adapter_dtype", True)
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM" if causal else "SEQ_CLS", **options)
    with torch.device("meta"):
        return get_peft_model(model, lora, autocast_adapter_dtype=cast)


def build_optimizer(row: Row, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": 0.01},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match row["optim"]:
        case "adamw_fused":
            return torch.optim.AdamW(groups, lr=1e-5, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=1e-5, foreach=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=1e-5)
        case _:
            from transformers.optimization import Adafactor

            return Adafactor(groups, lr=1e-5, scale_parameter=False, relative_step=False)


def _make_batch(row: Row, vocabulary: int) -> dict[str, torch.Tensor]:
    rows, length = row["mb"], row["seq"]
    tokens = torch.randint(0, vocabulary, (rows, length), device="meta")
    batch = {"input_ids": tokens}
    if row["padding"]:
        mask = torch.ones((rows, length), dtype=torch.long, device="meta")
        mask[:, length - length // 4 :] = 0
        batch["attention_mask"] = mask
    causal = row["task"] == "causal_lm"
    batch["labels"] = tokens.clone() if causal else torch.zeros((rows,), dtype=torch.long, device="meta")
    return batch


def train_step(row: Row, model: Any, optimizer: torch.optim.Optimizer, observe: Callable[[str], None]) -> None:
    """One optimizer step, telling `observe` each phase as it begins."""
    for _ in range(row["ga"]):
        batch = _make_batch(row, model.config.vocab_size)
        observe("forward")
        autocast = torch.autocast("cuda", dtype=torch.bfloat16) if row["amp"] else contextlib.nullcontext()
        with autocast:
            out = model(**batch)
        if row["fp32_outputs"] and row["amp"]:
            out["logits"] = out["logits"].float()
        loss = out["loss"]
        del out
        observe("backward")
        (loss / row["ga"]).backward()
        del loss, batch
    observe("optimizer_step")
    if row["clip"]:
        with_gradient = [parameter for parameter in model.parameters() if parameter.grad is not None]
        torch.nn.utils.clip_grad_norm_(with_gradient, row["clip"])
    optimizer.step()
    observe("zero_grad")
    model.zero_grad()
    observe("end")


def rehearse_row(row: Row, steps: int = 2, card: GPUParams = H100) -> tuple[Trace, list[Peak]]:
    """Trace and peaks of `steps` steps of a measured row."""
    with fake_device(card) as mode:
        model = build_model(row)
        optimizer = build_optimizer(row, model)
        tracker = Tracker(card, vocabulary=model.config.vocab_size, padded=row["padding"])
        mode.autocast.on_weight_cast = lambda copy: tracker.claim([copy], Kind.AUTOCAST_COPIES)

        def observe(phase: str) -> None:
            if phase == "optimizer_step":
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                tracker.claim(gradients, Kind.GRADIENTS)
            if phase == "zero_grad":
                states = [value for state in optimizer.state.values() for value in state.values()]
                tracker.claim([value for value in states if isinstance(value, torch.Tensor)], Kind.OPTIMIZER)
            tracker.observe(phase)

        gc.collect()
        gc.disable()
        try:
            tracker.claim([*model.parameters(), *model.buffers()], Kind.WEIGHTS)
            tracker.observe("load", empties_cache=True)
            tracker.observe("end")
            with tracker:
                for _ in range(steps):
                    train_step(row, model, optimizer, observe)
        finally:
            gc.enable()
        trace = tracker.finish()
    return trace, replay(trace, CachingAllocator())

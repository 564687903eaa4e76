"""Conversions of LLaMA-Factory beyond its tables."""

from typing import Any

from framework.converters.tables import (
    apply,
    carry_attention,
    carry_deepspeed_file,
    carry_optimizer,
    carry_schedule,
    carry_share,
    carry_steps,
    carry_trackers,
    first_rows,
    leave,
    put_precision,
    refuse,
    table,
)
from framework.converters.translation import Translation, Why

TOOL = "LLaMA-Factory"
_LOOKED_UP = "LLaMA-Factory finds it by its dataset_info.json: write its file or hub name"
_FOLDER = "data"
"""Default of `dataset_dir`."""


def translate(t: Translation) -> None:
    """Fill the translation. Raises RequestError if it is not a recipe of supervised or preference training."""
    rows = table("llamafactory")
    _refuse_without_training(t)
    refuse(t, rows)
    apply(t, rows, TOOL)
    if added := [token.strip() for text in t.source.strings("add_tokens") for token in text.split(",")]:
        t.put("model.added_tokens", added, "add_tokens")
    carry_optimizer(t, "optim")
    carry_schedule(t, "lr_scheduler_type", "warmup_ratio", "warmup_steps")
    carry_steps(t, "max_steps")
    carry_attention(t, "flash_attn")
    carry_trackers(t, "report_to")
    carry_deepspeed_file(t)
    if t.has("training.task", "pretrain"):
        apply(t, rows["pretrain"], TOOL)
    if t.has("training.task", "preference"):
        apply(t, rows["preference"], TOOL)
        if t.has("training.preference.loss_type", "simpo") and not t.has("training.preference.beta"):
            t.put("training.preference.beta", 0.1, comment="LLaMA-Factory's default")
    _checkpointing(t)
    _adapter(t)
    _optimizers(t)
    _precision(t)
    _data(t)
    leave(t, rows)


def _refuse_without_training(t: Translation) -> None:
    source = t.source
    if source.get("do_train") is not True and (source.get("do_predict") or source.get("do_eval")):
        key = "do_predict" if source.get("do_predict") else "do_eval"
        message = "this file asks for predictions or an evaluation, and trains nothing"
        raise source.refuse(key, message, "a recipe that trains; `tunesmith predict` completes rows")
    if source.get("do_train") is not True and not source.has("dataset"):
        key = next((key for key in ("infer_backend", "export_dir", "task") if source.has(key)), "model_name_or_path")
        message = "this file has no dataset: it is for inference, export or evaluation, and trains nothing"
        raise source.refuse(key, message, "a recipe with `dataset`")


def _checkpointing(t: Translation) -> None:
    """On unless LLaMA-Factory's own key disables it, regardless of transformers' key."""
    is_off = t.source.get("disable_gradient_checkpointing") is True
    keys = ("disable_gradient_checkpointing", "gradient_checkpointing")
    comment = "" if any(t.source.has(key) for key in keys) else "LLaMA-Factory's default"
    t.put("training.enable_gradient_checkpointing", not is_off, *keys, comment=comment)


def _adapter(t: Translation) -> None:
    source, kind = t.source, t.source.text("finetuning_type") or "lora"
    if kind not in ("lora", "oft"):
        apply(t, table("llamafactory")["full"], TOOL)
        if kind == "freeze":
            t.head.append("LLaMA-Factory trains only its last blocks: add model.freeze_first_blocks")
        return
    t.put("training.use_peft", True, "finetuning_type")
    if kind == "oft":
        t.put("peft.peft_method", "oft", "finetuning_type")
        apply(t, table("llamafactory")["oft"], TOOL)
    else:
        apply(t, table("llamafactory")["adapter"], TOOL)
        rank, alpha = t.source.get("lora_rank") or 8, t.source.get("lora_alpha")
        t.put("peft.lora_r", rank, "lora_rank")
        is_known = isinstance(rank, int) and alpha is None
        doubled = "twice the rank, LLaMA-Factory's default" if is_known else ""
        t.put("peft.lora_alpha", rank * 2 if is_known else alpha, "lora_alpha", comment=doubled)
    target = source.get(f"{kind}_target") or "all"
    names = target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
    t.put("peft.lora_target_modules", ["all-linear"] if names == ["all"] else names, f"{kind}_target")
    whole = [name.strip() for text in source.strings("additional_target") for name in text.split(",")]
    if whole:
        t.put("peft.lora_modules_to_save", whole, "additional_target")
    bits = source.number("quantization_bit")
    if bits in (4, 8):
        t.put("peft.q_lora", True, "quantization_bit", "quantization_method")
        t.put("peft.q_lora_bits", int(bits), "quantization_bit")
        nested = source.get("double_quantization") is not False
        comment = "" if source.has("double_quantization") else "LLaMA-Factory's default"
        if bits == 4:
            t.put("peft.use_bnb_nested_quant", nested, "double_quantization", comment=comment)
        t.carry("quantization_type", "peft.bnb_4bit_quant_type")
    elif bits:
        t.leave("quantization_bit", Why.WRITE, "peft.q_lora_bits: 4 or 8, next to peft.q_lora: true")


def _optimizers(t: Translation) -> None:
    source = t.source
    for kind in ("apollo", "galore"):
        if source.get(f"use_{kind}") is not True:
            continue
        t.put("training.optimizer", f"{kind}_adamw", f"use_{kind}")
        apply(t, table("llamafactory")[kind], TOOL)
        if source.get(f"{kind}_layerwise") is True:
            t.put("training.optimizer_in_backward", True, f"{kind}_layerwise")
            t.put("training.max_grad_norm", 0, comment="the norm is not known while gradients are used up")
    if source.get("use_muon") is True:
        t.put("training.optimizer", "muon", "use_muon")


def _precision(t: Translation) -> None:
    """Trained weights are float32 unless `pure_bf16`; frozen weights have the autocast dtype."""
    source = t.source
    if source.get("pure_bf16") is True:
        put_precision(t, "bfloat16", "none", "pure_bf16", "bf16")
        return
    word = "bf16" if source.get("bf16") is True else "fp16" if source.get("fp16") is True else "none"
    of = [key for key in ("bf16", "fp16") if source.get(key) is True]
    if not t.has("training.use_peft", True):
        put_precision(t, "float32", word, *of)
    elif word == "none":
        put_precision(t, "bfloat16", word, comment="LLaMA-Factory's, where the card has it and the checkpoint is in it")
    else:
        put_precision(t, {"bf16": "bfloat16", "fp16": "float16"}[word], word, *of)


def _data(t: Translation) -> None:
    source = t.source
    limit = source.number("max_samples")
    folder = source.get("dataset_dir") or _FOLDER
    for key, ours in {"dataset": "data.train", "eval_dataset": "data.eval"}.items():
        names = [name.strip() for text in source.strings(key) for name in text.split(",") if name.strip()]
        made: list[dict[str, Any]] = [{"path": f"{folder}/{name}.json"} for name in names]
        if ours == "data.eval" and source.get("eval_on_each_dataset") is True:
            made = [{**one, "eval_set": name} for one, name in zip(made, names, strict=True)]
        if limit:
            made = [first_rows(one, int(limit)) for one in made]
        if made:
            used = [key, "max_samples", "dataset_dir", *(["eval_on_each_dataset"] if ours == "data.eval" else [])]
            t.put(ours, made, *used, comment=_LOOKED_UP)
    carry_share(t, "val_size")
    strategies = ("eval_strategy", "evaluation_strategy")
    strategy = next((word for word in map(source.text, strategies) if word), "no")
    if strategy == "steps":
        t.carry("eval_steps", "training.eval_steps")
    elif strategy == "epoch":
        t.put("training.eval_steps", "epoch", *strategies)
    else:
        t.leave("eval_steps", Why.DEFAULT, "eval_strategy is not `steps`: nothing is evaluated in between")
        for key in strategies:
            t.leave(key, Why.DEFAULT, "nothing is evaluated in between")

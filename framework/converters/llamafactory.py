"""LLaMA-Factory: the arguments of transformers, and its own next to them."""

from typing import Any

from framework.converters.translation import Translation, Why
from framework.converters.words import (
    carry_attention,
    carry_deepspeed_file,
    carry_optimizer,
    carry_schedule,
    carry_share,
    carry_steps,
    carry_trackers,
    first_rows,
    put_precision,
)

SAME = {
    "model_name_or_path": "model.model_name",
    "model_revision": "model.model_revision",
    "trust_remote_code": "model.trust_remote_code",
    "cutoff_len": "model.model_max_length",
    "enable_liger_kernel": "model.enable_liger_kernel",
    "num_train_epochs": "training.num_train_epochs",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "per_device_eval_batch_size": "training.per_device_eval_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "learning_rate": "training.learning_rate",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "adam_epsilon": "training.adam_epsilon",
    "max_grad_norm": "training.max_grad_norm",
    "seed": "training.seed",
    "output_dir": "training.output_dir",
    "run_name": "training.run_name",
    "save_steps": "training.save_steps",
    "save_total_limit": "training.save_total_limit",
    "logging_steps": "training.logging_steps",
    "dataloader_num_workers": "data.workers",
    "gradient_checkpointing_kwargs.use_reentrant": "training.gradient_checkpointing_kwargs.use_reentrant",
    "use_reentrant_gc": "training.gradient_checkpointing_kwargs.use_reentrant",
}
"""Their key -> ours, where the value means the same."""
LEFT = {
    (Why.DEFAULT, "metrics.jsonl and `tunesmith report` show the loss"): "plot_loss",
    (Why.ABSENT, "rows are tokenised once, by one process, and kept (data.cache)"): "preprocessing_num_workers",
    (Why.DEFAULT, "a rank that fails ends all, without waiting"): "ddp_timeout",
    (Why.DEFAULT, "the cache is renewed where files, tokenizer or limits change"): "overwrite_cache",
    (Why.NOT_OURS, "experts that are computed by the CPU (ktransformers)"): (
        "use_kt kt_config kt_cpu_activation kt_non_expert_weight_path kt_weight_path"
    ),
    (Why.NOT_OURS, "another loss than the cross entropy of all supervised tokens"): (
        "use_dft_loss use_eaft_loss use_asft_loss"
    ),
    (Why.NOT_OURS, "training of one block after another (BAdam); model.freeze_first_blocks freezes for good"): (
        "use_badam badam_mode badam_switch_interval badam_switch_mode badam_verbose"
    ),
    (Why.NOT_OURS, "Adam-mini; adamw_torchao_8bit and adafactor have small states"): "use_adam_mini",
    (Why.ABSENT, "its kernels; model.enable_liger_kernel and training.compile fuse kernels here"): "use_v1_kernels",
    (Why.WRITE, "the name of a model that this adapter was merged into, as the model"): "adapter_name_or_path",
    (Why.DEFAULT, "the adapter is exported for the original weights"): "pissa_convert",
    (Why.ABSENT, "the exact decomposition is computed"): "pissa_iter",
}  # fmt: skip
"""Why something is not carried -> the keys."""
TEMPLATES = {"llama3": "llama3", "chatml": "chatml", "gemma": "gemma", "mistral": "mistral"}
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_SEEING = (
    "image_max_pixels", "video_max_pixels", "video_fps", "video_maxlen", "freeze_vision_tower",
    "freeze_multi_modal_projector", "audio_sampling_rate",
)  # fmt: skip
_LOOKED_UP = "LLaMA-Factory finds it by its dataset_info.json: write its file or hub name"
_PROJECTED = {
    kind: {
        "rank": ("training.projection_rank", 16),
        "update_interval": ("training.projection_update_steps", 200),
        "scale": ("training.projection_scale", scale),
    }
    for kind, scale in {"apollo": 32.0, "galore": 2.0}.items()
}
"""Keys of an optimizer that projects -> ours, and the value where none is written (its finetuning_args.py, 2026-11)."""
_FOLDER = "data"
"""`dataset_dir` where none is written."""


def translate(t: Translation) -> None:
    """Fills the translation. Raises RequestError for what is not a recipe of supervised or preference training."""
    _refuse(t)
    source = t.source
    t.rename(SAME)
    carry_optimizer(t, "optim")
    carry_schedule(t, "lr_scheduler_type", "warmup_ratio", "warmup_steps")
    carry_steps(t, "max_steps")
    carry_attention(t, "flash_attn")
    carry_trackers(t, "report_to")
    carry_deepspeed_file(t, "deepspeed")
    _task(t)
    _checkpointing(t)
    _adapter(t)
    _optimizers(t)
    _precision(t)
    _data(t)
    if source.get("cutoff_len") is None:
        t.put("model.model_max_length", 2048, comment="LLaMA-Factory's default")
    t.leave_all(LEFT)


def _refuse(t: Translation) -> None:
    source = t.source
    if source.get("do_train") is not True and (source.get("do_predict") or source.get("do_eval")):
        key = "do_predict" if source.get("do_predict") else "do_eval"
        message = "this file asks for predictions or an evaluation, and trains nothing"
        raise source.refuse(key, message, "a recipe that trains; `tunesmith predict` completes rows")
    if source.get("do_train") is not True and not source.has("dataset"):
        key = next((key for key in ("infer_backend", "export_dir", "task") if source.has(key)), "model_name_or_path")
        message = "this file has no dataset: it is for inference, export or evaluation, and trains nothing"
        raise source.refuse(key, message, "a recipe with `dataset`")
    if source.text("stage") == "ppo":
        raise source.refuse("stage", "PPO learns from rollouts, which is not ours for now", "pt, sft, rm, dpo or kto")
    seeing = next((key for key in _SEEING if source.get(key) is not None), None)
    if seeing:
        raise source.refuse(seeing, "rows of images, video or sound are not ours for now", "a recipe on text")
    if source.text("finetuning_type") not in ("", "lora", "full", "freeze"):
        message = f"`{source.get('finetuning_type')}` is an adapter that is not ours for now"
        raise source.refuse("finetuning_type", message, "lora or full")


def _task(t: Translation) -> None:
    source, stage = t.source, t.source.text("stage") or "sft"
    task = {"pt": "pretrain", "sft": "sft", "rm": "reward", "dpo": "preference", "kto": "preference"}.get(stage)
    if task is None:
        raise source.refuse("stage", f"{stage!r} is no stage that is known", "pt, sft, rm, dpo or kto")
    t.put("training.task", task, "stage")
    if task != "preference":
        return
    loss = "kto" if stage == "kto" else LOSSES.get(source.text("pref_loss") or "sigmoid")
    if loss:
        t.put("training.preference.loss_type", loss, "stage", "pref_loss")
    else:
        t.leave("pref_loss", Why.WRITE, f"training.preference.loss_type, one of {', '.join(LOSSES.values())}")
    t.carry("pref_beta", "training.preference.beta")
    if loss == "simpo" and not t.has("training.preference.beta"):
        t.put("training.preference.beta", 0.1, comment="LLaMA-Factory's default")
    t.carry("simpo_gamma", "training.preference.simpo_gamma")
    t.carry("kto_chosen_weight", "training.preference.desirable_weight")
    t.carry("kto_rejected_weight", "training.preference.undesirable_weight")


def _checkpointing(t: Translation) -> None:
    """On unless it is switched off there, whatever transformers' own key says."""
    is_off = t.source.get("disable_gradient_checkpointing") is True
    keys = ("disable_gradient_checkpointing", "gradient_checkpointing")
    comment = "" if any(t.source.has(key) for key in keys) else "LLaMA-Factory's default"
    t.put("training.enable_gradient_checkpointing", not is_off, *keys, comment=comment)


def _adapter(t: Translation) -> None:
    source, kind = t.source, t.source.text("finetuning_type") or "lora"
    if kind != "lora":
        if kind == "freeze":
            t.leave(
                "finetuning_type", Why.WRITE, "model.freeze_first_blocks: how many are not trained; until then none"
            )
            t.head.append("LLaMA-Factory trains its last blocks alone: add model.freeze_first_blocks")
        else:
            t.leave("finetuning_type", Why.DEFAULT, "all weights are trained")
        return
    t.put("training.use_peft", True, "finetuning_type")
    rank = source.get("lora_rank") or 8
    t.put("peft.lora_r", rank, "lora_rank")
    alpha = source.get("lora_alpha")
    is_known = isinstance(rank, int) and alpha is None
    comment = "twice the rank, LLaMA-Factory's default" if is_known else ""
    t.put("peft.lora_alpha", rank * 2 if is_known else alpha, "lora_alpha", comment=comment)
    t.carry("lora_dropout", "peft.lora_dropout")
    t.carry("loraplus_lr_ratio", "peft.lora_plus_lr_ratio")
    target = source.get("lora_target") or "all"
    names = target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
    t.put("peft.lora_target_modules", ["all-linear"] if names == ["all"] else names, "lora_target")
    whole = [name.strip() for text in source.strings("additional_target") for name in text.split(",")]
    if whole:
        t.put("peft.lora_modules_to_save", whole, "additional_target")
    for switch, method in {"use_dora": "dora", "use_rslora": "rslora", "pissa_init": "pissa"}.items():
        if source.get(switch) is True:
            t.put("peft.peft_method", method, switch)
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
        for name, (ours, default) in _PROJECTED[kind].items():
            if source.get(f"{kind}_{name}") is None:
                t.put(ours, default, comment="LLaMA-Factory's default")
            t.carry(f"{kind}_{name}", ours)
        t.leave(f"{kind}_target", Why.DEFAULT, "every matrix of the blocks")
        t.leave(f"{kind}_scale_type", Why.ABSENT, "updates are scaled by channel")
        if source.get(f"{kind}_layerwise") is True:
            t.put("training.optimizer_in_backward", True, f"{kind}_layerwise")
            t.put("training.max_grad_norm", 0, comment="the norm is not known while gradients are used up")
    if source.get("use_muon") is True:
        t.put("training.optimizer", "muon", "use_muon")


def _precision(t: Translation) -> None:
    """Trained weights are float32 unless `pure_bf16`; frozen ones are in the dtype of autocast."""
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
    if source.get("fp8") is True:
        t.put("training.fp8", "tensorwise", "fp8", "fp8_backend")
        t.leave("fp8_enable_fsdp_float8_all_gather", Why.DEFAULT, "shards are gathered in their own dtype")


def _data(t: Translation) -> None:
    source = t.source
    limit = source.number("max_samples")
    folder = source.get("dataset_dir") or _FOLDER
    for key, ours in {"dataset": "data.train", "eval_dataset": "data.eval"}.items():
        names = [name.strip() for text in source.strings(key) for name in text.split(",")]
        made: list[dict[str, Any]] = [{"path": f"{folder}/{name}.json"} for name in names if name]
        if limit:
            made = [first_rows(one, int(limit)) for one in made]
        if made:
            t.put(ours, made, key, "max_samples", "dataset_dir", comment=_LOOKED_UP)
    carry_share(t, "val_size")
    t.carry("packing", "data.packing")
    if source.get("neat_packing") is True:
        t.put("data.packing", True, "neat_packing", "packing")
    elif source.get("packing") is None and t.has("training.task", "pretrain"):
        t.put("data.packing", True, "packing", comment="LLaMA-Factory's default in pretraining")
    t.carry("streaming", "data.streaming")
    if source.get("train_on_prompt") is True:
        t.put("data.supervise", "all", "train_on_prompt")
    elif source.get("mask_history") is True:
        t.put("data.supervise", "last", "mask_history")
    template = source.text("template")
    if template in TEMPLATES:
        t.put("model.chat_template", TEMPLATES[template], "template")
    elif template:
        text = f"a file under model.chat_template where the tokenizer's own is not {template}"
        t.leave("template", Why.WRITE, text)
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

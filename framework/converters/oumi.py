"""Oumi: sections much like ours, since both use the names of one guide to out-of-memory errors."""

from typing import Any

from framework.converters.translation import Translation, Why
from framework.converters.words import (
    carry_attention,
    carry_optimizer,
    carry_schedule,
    carry_stage,
    carry_steps,
    product,
    put_precision,
)

SAME = {
    "model.model_name": "model.model_name",
    "model.model_revision": "model.model_revision",
    "model.tokenizer_name": "model.tokenizer_name",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.load_pretrained_weights": "model.load_pretrained_weights",
    "model.model_max_length": "model.model_max_length",
    "model.enable_liger_kernel": "model.enable_liger_kernel",
    "model.freeze_layers": "model.freeze_layers",
    "training.use_peft": "training.use_peft",
    "training.num_train_epochs": "training.num_train_epochs",
    "training.per_device_train_batch_size": "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size": "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "training.learning_rate": "training.learning_rate",
    "training.weight_decay": "training.weight_decay",
    "training.adam_beta1": "training.adam_beta1",
    "training.adam_beta2": "training.adam_beta2",
    "training.adam_epsilon": "training.adam_epsilon",
    "training.sgd_momentum": "training.sgd_momentum",
    "training.max_grad_norm": "training.max_grad_norm",
    "training.enable_gradient_checkpointing": "training.enable_gradient_checkpointing",
    "training.gradient_checkpointing_kwargs.use_reentrant": "training.gradient_checkpointing_kwargs.use_reentrant",
    "training.compile": "training.compile",
    "training.empty_device_cache_steps": "training.empty_device_cache_steps",
    "training.seed": "training.seed",
    "training.output_dir": "training.output_dir",
    "training.run_name": "training.run_name",
    "training.logging_steps": "training.logging_steps",
    "training.save_total_limit": "training.save_total_limit",
    "data.train.pack": "data.packing",
    "data.train.stream": "data.streaming",
}
"""Their key -> ours, where the value means the same."""
OF_ADAPTER = {
    name: f"peft.{name}"
    for name in ("lora_r", "lora_alpha", "lora_dropout", "q_lora", "q_lora_bits", "bnb_4bit_quant_type")
} | {
    "use_bnb_nested_quant": "peft.use_bnb_nested_quant",
    "lora_modules_to_save": "peft.lora_modules_to_save",
    "lora_exclude_modules": "peft.lora_exclude_modules",
}
OF_FSDP = {
    name: f"fsdp.{name}"
    for name in ("sharding_strategy", "cpu_offload", "forward_prefetch", "backward_prefetch", "state_dict_type")
}
LEFT = {
    (Why.DEFAULT, "the tokenizer's own; labels are made from positions, so padding needs no token of its own"): (
        "model.tokenizer_pad_token model.tokenizer_kwargs"
    ),
    (Why.WRITE, "a key of model.architecture, next to the rest of the model's config"): "model.model_kwargs",
    (Why.ABSENT, "each rank makes its own batches"): "training.dataloader_main_process_only",
    (Why.ABSENT, "a worker prepares 2 batches ahead"): "training.dataloader_prefetch_factor",
    (Why.DEFAULT, "metrics.jsonl has them of every step"): "training.include_performance_metrics",
    (Why.DEFAULT, "`final/` is always written"): "training.save_final_model",
    (Why.ABSENT, "what is printed is the same for all runs"): (
        "training.log_level training.log_model_summary training.logging_dir training.logging_first_step"
    ),
    (Why.ABSENT, "arguments of another trainer are no keys here"): "training.trainer_kwargs",
    (Why.DEFAULT, "each block is a unit"): "fsdp.auto_wrap_policy",
    (Why.DEFAULT, "settings of DeepSpeed's buffers; sharding is FSDP2's"): "deepspeed",
    (Why.DEFAULT, "an adapter starts as peft starts it"): "peft.lora_init_weights",
    (Why.DEFAULT, "4-bit products are computed in the dtype of autocast"): "peft.bnb_4bit_compute_dtype",
    (Why.DEFAULT, "rows are shuffled by training.seed"): "data.train.seed data.validation.seed",
    (Why.DEFAULT, "units are gathered in the dtype of training.mixed_precision_dtype"): "fsdp.mixed_precision",
    (Why.ABSENT, "rows are read by `datasets`, without torchdata"): "data.train.use_torchdata",
}  # fmt: skip
"""Why something is not carried -> the keys."""
_TRAINERS = {"trl_sft": "sft", "hf": "sft", "oumi": "sft", "trl_dpo": "preference", "trl_kto": "preference"}
_TEMPLATES = {"llama3-instruct": "llama3", "chat_ml": "chatml", "chatml": "chatml", "gemma": "gemma"}
_CLASSES = {
    "huggingfacedataset": "messages",
    "promptresponsedataset": "prompt_completion",
    "text_sft_jsonl": "messages",
}
"""Datasets of Oumi that are a way of reading rows -> our form of them."""
_COLUMNS = {"messages_column": "messages", "prompt_column": "prompt", "response_column": "completion"}
_DTYPES = {
    "f32": "float32", "float": "float32", "f16": "float16", "half": "float16", "bf16": "bfloat16",
}  # fmt: skip
"""Spellings in Oumi's torch_utils.py -> ours."""
_ONLY_ANSWERS = "text_completions_only_with_padding"


def translate(t: Translation) -> None:
    """Fills the translation. Raises RequestError for what is not a recipe of supervised or preference training."""
    _refuse(t)
    source = t.source
    t.rename(SAME)
    carry_optimizer(t, "training.optimizer")
    carry_schedule(t, "training.lr_scheduler_type", "training.warmup_ratio", "training.warmup_steps")
    carry_steps(t, "training.max_steps")
    carry_attention(t, "model.attn_implementation")
    _task(t)
    _schedule_end(t)
    _adapter(t)
    _sharding(t)
    if not t.has("training.mixed_precision_dtype"):
        word = source.text("training.mixed_precision_dtype") or "none"
        held = source.text("model.torch_dtype_str") or "float32"
        comment = "" if source.has("model.torch_dtype_str") else "Oumi's default"
        put_precision(t, _DTYPES.get(held, held), None, "model.torch_dtype_str", comment=comment)
        t.put("training.mixed_precision_dtype", word, "training.mixed_precision_dtype")
    _data(t)
    _recording(t)
    t.leave_all(LEFT)


def _refuse(t: Translation) -> None:
    source = t.source
    trainer = source.text("training.trainer_type")
    if trainer not in ("", *_TRAINERS):
        of_rollouts = "learns from what the model generates, which is not ours for now"
        message = f"the trainer {source.get('training.trainer_type')} {of_rollouts}"
        raise source.refuse("training.trainer_type", message, "TRL_SFT, TRL_DPO, TRL_KTO, HF or OUMI")
    for part in ("train", "validation"):
        if source.text(f"data.{part}.collator_name").startswith("vision"):
            key = f"data.{part}.collator_name"
            raise source.refuse(key, "rows of images are not ours for now", "a recipe on text")
        for item in source.items(f"data.{part}.datasets"):
            key = f"{item}.dataset_kwargs.processor_name"
            if source.get(key) or source.text(f"{item}.dataset_name") == "hf_vision":
                raise source.refuse(item, "rows of images are not ours for now", "a recipe on text")


def _task(t: Translation) -> None:
    trainer = t.source.text("training.trainer_type") or "trl_sft"
    t.put("training.task", _TRAINERS[trainer], "training.trainer_type")
    if trainer in ("trl_dpo", "trl_kto"):
        t.put("training.preference.loss_type", trainer.removeprefix("trl_"), "training.trainer_type")


def _schedule_end(t: Translation) -> None:
    """The last rate, which Oumi writes as a share of the peak under the arguments of the schedule."""
    source, key = t.source, "training.lr_scheduler_kwargs.min_lr_rate"
    share, rate = source.number(key), source.number("training.learning_rate")
    if share is not None and rate is not None and t.has("training.lr_scheduler_type", "cosine_with_min_lr"):
        t.put("training.min_learning_rate", product(share, rate), key, comment=f"{share:g} of the learning rate")
    t.carry("training.lr_scheduler_kwargs.min_lr", "training.min_learning_rate")
    if t.has("training.lr_scheduler_type", "cosine_with_restarts"):
        t.carry("training.lr_scheduler_kwargs.num_cycles", "training.lr_cycles")
    t.leave("training.lr_scheduler_kwargs.num_cycles", Why.DEFAULT, "half a wave")


def _adapter(t: Translation) -> None:
    source = t.source
    if source.get("training.use_peft") is not True:
        t.leave("peft", Why.DEFAULT, "there is no adapter: training.use_peft is off")
        return
    t.rename(OF_ADAPTER, "peft.")
    names = source.get("peft.lora_target_modules")
    targets = [*source.strings("peft.lora_target_modules"), *source.strings("peft.lora_target_parameters")]
    if names is not None:
        of = ("peft.lora_target_modules", "peft.lora_target_parameters")
        t.put("peft.lora_target_modules", ["all-linear"] if names in ("all-linear", ["all-linear"]) else targets, *of)
    if source.get("peft.peft_save_mode"):
        t.put("peft.peft_save_mode", source.text("peft.peft_save_mode"), "peft.peft_save_mode")


def _sharding(t: Translation) -> None:
    source = t.source
    if source.get("fsdp.enable_fsdp") is True:
        t.put("fsdp.enable_fsdp", True, "fsdp.enable_fsdp", comment="start it with --nproc N")
        t.rename(OF_FSDP, "fsdp.")
        classes = source.get("fsdp.transformer_layer_cls")
        if isinstance(classes, str) and "," not in classes:
            t.put("fsdp.transformer_layer_cls", classes, "fsdp.transformer_layer_cls")
        else:
            t.leave("fsdp.transformer_layer_cls", Why.DEFAULT, "the blocks of the model, inferred and printed")
        t.leave(
            "fsdp.mixed_precision", Why.DEFAULT, "units are gathered in the dtype of training.mixed_precision_dtype"
        )
    if source.get("deepspeed.enable_deepspeed") is True:
        stage = str(source.get("deepspeed.zero_stage") or 0).rpartition("_")[2]
        offload = source.text("deepspeed.offload_optimizer.device") == "cpu"
        offload = offload or source.text("deepspeed.offload_param.device") == "cpu"
        devices = [f"deepspeed.offload_{what}.device" for what in ("optimizer", "param")]
        of = ["deepspeed.enable_deepspeed", "deepspeed.zero_stage", *(devices if offload else [])]
        carry_stage(t, int(stage) if stage.isdecimal() else 0, offload, *of)
        word = source.text("deepspeed.precision")
        if word in ("bf16", "fp16"):
            comment = "DeepSpeed keeps float32 masters"
            put_precision(t, "float32", word, "model.torch_dtype_str", "deepspeed.precision", comment=comment)


def _data(t: Translation) -> None:
    source = t.source
    for part, ours in {"train": "data.train", "validation": "data.eval"}.items():
        made: list[dict[str, Any]] = []
        of: list[str] = []
        for item in source.items(f"data.{part}.datasets"):
            one, used = _source(t, item)
            made.append(one)
            of += used
        if made:
            t.put(ours, made, *of)
    weights = [one.get("weight") for one in t.entries["data.train"].value] if t.has("data.train") else []
    if any(weights):
        rule = source.text("data.train.mixture_strategy")
        word = rule if rule in ("first_exhausted", "all_exhausted") else "first_exhausted"
        t.put("data.mixing", word, "data.train.mixture_strategy")
    target, collator = source.text("data.train.train_target"), source.text("data.train.collator_name")
    keys = ("data.train.train_target", "data.train.collator_name")
    if target == "final_assistant_turn":
        t.put("data.supervise", "last", *keys)
    elif t.has("training.task", "sft"):
        is_all = not target and collator != _ONLY_ANSWERS
        comment = f"Oumi learns the prompts too, unless its collator is {_ONLY_ANSWERS}" if is_all else ""
        t.put("data.supervise", "all" if is_all else "assistant", *keys, comment=comment)
    for part in ("data.train", "data.validation"):
        t.leave(f"{part}.collator_kwargs", Why.DEFAULT, "the chat template tells where answers begin and end")
    t.leave("data.validation.collator_name", Why.DEFAULT, "rows to evaluate on are read as those to learn from")
    t.leave("data.validation.train_target", Why.DEFAULT, "rows to evaluate on are read as those to learn from")
    template = source.text("model.chat_template")
    if template in _TEMPLATES:
        t.put("model.chat_template", _TEMPLATES[template], "model.chat_template")
    elif template == "auto":
        t.leave("model.chat_template", Why.DEFAULT, "the tokenizer's own")
    elif template:
        text = f"a file under model.chat_template where the tokenizer's own is not {template}"
        t.leave("model.chat_template", Why.WRITE, text)


def _source(t: Translation, item: str) -> tuple[dict[str, Any], list[str]]:
    """One source, and the keys it was made of."""
    source, used = t.source, [f"{item}.dataset_name"]
    name, path = source.get(f"{item}.dataset_name"), source.get(f"{item}.dataset_path")
    on_hub = source.get(f"{item}.dataset_kwargs.hf_dataset_path")
    columns: dict[str, Any] = {}
    made: dict[str, Any] = {"path": path or on_hub or name}
    used += [f"{item}.dataset_path", f"{item}.dataset_kwargs.hf_dataset_path"]
    for theirs, ours in {"subset": "name", "split": "split", "mixture_proportion": "weight"}.items():
        if source.get(f"{item}.{theirs}") is not None:
            made[ours] = source.get(f"{item}.{theirs}")
            used.append(f"{item}.{theirs}")
    form = _CLASSES.get(str(name).lower())
    if form:
        made["format"] = form
    for theirs, ours in _COLUMNS.items():
        column = source.get(f"{item}.dataset_kwargs.{theirs}")
        if column is not None:
            used.append(f"{item}.dataset_kwargs.{theirs}")
            columns |= {ours: column} if column != ours else {}
    if columns:
        made["columns"] = columns
    limit = source.number(f"{item}.dataset_kwargs.limit") or source.number(f"{item}.sample_count")
    if limit and "[" not in str(made.get("split", "")):
        made["split"] = f"{made.get('split', 'train')}[:{int(limit)}]"
        used += [f"{item}.dataset_kwargs.limit", f"{item}.sample_count"]
    if made.get("split") == "train":
        del made["split"]
    reasons = {
        "dataset_kwargs.seq_length": (Why.ABSENT, "rows are as long as model.model_max_length"),
        "shuffle": (Why.DEFAULT, "rows are always shuffled, by training.seed"),
        "seed": (Why.DEFAULT, "rows are shuffled by training.seed"),
        "transform_num_workers": (Why.ABSENT, "rows are tokenised once, by one process, and kept (data.cache)"),
        "trust_remote_code": (Why.NOT_OURS, "datasets that bring their own code"),
        "dataset_kwargs": (Why.WRITE, "format and columns of this source (docs/data.md)"),
    }
    for key, (why, text) in reasons.items():
        for inner in (f"{item}.{key}", *source.below(f"{item}.{key}")):
            if inner in source.leaves and inner not in used and t.is_open(inner):
                t.leave(inner, why, text)
    return made, used


def _recording(t: Translation) -> None:
    source = t.source
    if source.number("training.save_steps"):
        t.carry("training.save_steps", "training.save_steps")
    elif source.get("training.save_epoch") is True:
        t.put("training.save_steps", "epoch", "training.save_epoch")
    else:
        t.leave("training.save_steps", Why.DEFAULT, "the end is saved, and nothing before it")
    strategy = source.text("training.eval_strategy") or "no"
    if strategy == "epoch":
        t.put("training.eval_steps", "epoch", "training.eval_strategy")
        t.leave("training.eval_steps", Why.DEFAULT, "the strategy there is `epoch`")
    elif strategy == "no":
        t.leave("training.eval_steps", Why.DEFAULT, "eval_strategy is `no`: nothing is evaluated in between")
        t.leave("training.eval_strategy", Why.DEFAULT, "nothing is evaluated in between")
    else:
        t.carry("training.eval_steps", "training.eval_steps")
        t.leave("training.eval_strategy", Why.DEFAULT, "training.eval_steps says it")
    wanted = [name for name in ("wandb", "tensorboard", "mlflow") if source.get(f"training.enable_{name}") is True]
    if wanted:
        t.put("training.trackers", wanted, *(f"training.enable_{name}" for name in wanted))
    t.carry("training.dataloader_num_workers", "data.workers")
    if source.text("training.dataloader_num_workers") == "auto":
        t.drop("data.workers", Why.WRITE, "data.workers: a number of processes; 0 unless it is set")

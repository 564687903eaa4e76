"""Conversions of Oumi beyond its tables."""

from typing import Any

from framework.converters.tables import (
    apply,
    carry_attention,
    carry_layer_class,
    carry_optimizer,
    carry_schedule,
    carry_stage,
    carry_steps,
    leave,
    product,
    put_precision,
    refuse,
    table,
)
from framework.converters.translation import Translation, Why

TOOL = "Oumi"
_ONLY_ANSWERS = "text_completions_only_with_padding"


def translate(t: Translation) -> None:
    """Fill the translation. Raises RequestError if it is not a recipe of supervised or preference training."""
    rows, source = table("oumi"), t.source
    refuse(t, rows)
    _refuse_images(t)
    apply(t, rows, TOOL)
    carry_optimizer(t, "training.optimizer")
    carry_schedule(t, "training.lr_scheduler_type", "training.warmup_ratio", "training.warmup_steps")
    carry_steps(t, "training.max_steps")
    carry_attention(t, "model.attn_implementation")
    _schedule_end(t)
    _adapter(t)
    _sharding(t)
    if not t.has("training.mixed_precision_dtype"):
        word = source.text("training.mixed_precision_dtype") or "none"
        held = source.text("model.torch_dtype_str") or "float32"
        comment = "" if source.has("model.torch_dtype_str") else "Oumi's default"
        put_precision(t, rows["dtypes"].get(held, held), None, "model.torch_dtype_str", comment=comment)
        t.put("training.mixed_precision_dtype", word, "training.mixed_precision_dtype")
    _data(t)
    _recording(t)
    leave(t, rows)


def _refuse_images(t: Translation) -> None:
    source = t.source
    for part in ("train", "validation"):
        for item in source.items(f"data.{part}.datasets"):
            key = f"{item}.dataset_kwargs.processor_name"
            if source.get(key) or source.text(f"{item}.dataset_name") == "hf_vision":
                raise source.refuse(item, "rows of images are not ours for now", "a recipe on text")


def _schedule_end(t: Translation) -> None:
    """The final rate, in Oumi a share of the peak among the schedule's arguments."""
    source, key = t.source, "training.lr_scheduler_kwargs.min_lr_rate"
    share, rate = source.number(key), source.number("training.learning_rate")
    if share is not None and rate is not None and t.has("training.lr_scheduler_type", "cosine_with_min_lr"):
        t.put("training.min_learning_rate", product(share, rate), key, comment=f"{share:g} of the learning rate")
    t.carry("training.lr_scheduler_kwargs.min_lr", "training.min_learning_rate")
    if t.has("training.lr_scheduler_type", "cosine_with_restarts"):
        t.carry("training.lr_scheduler_kwargs.num_cycles", "training.lr_cycles")


def _adapter(t: Translation) -> None:
    source = t.source
    if source.get("training.use_peft") is not True:
        return
    apply(t, table("oumi")["adapter"], TOOL)
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
        apply(t, table("oumi")["sharded"], TOOL)
        carry_layer_class(t, "fsdp.transformer_layer_cls")
    if source.get("deepspeed.enable_deepspeed") is True:
        stage = str(source.get("deepspeed.zero_stage") or 0).rpartition("_")[2]
        offload = source.text("deepspeed.offload_optimizer.device") == "cpu"
        offload = offload or source.text("deepspeed.offload_param.device") == "cpu"
        devices = [f"deepspeed.offload_{what}.device" for what in ("optimizer", "param")]
        of = ["deepspeed.enable_deepspeed", "deepspeed.zero_stage", *(devices if offload else [])]
        carry_stage(t, int(stage) if stage in ("1", "2", "3") else 0, offload, *of)
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
        for item in source.items(f"data.{part}.datasets"):
            leave(t, table("oumi")["source"], f"{item}.")
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
        comment = f"Oumi trains on the prompts too, unless its collator is {_ONLY_ANSWERS}" if is_all else ""
        t.put("data.supervise", "all" if is_all else "assistant", *keys, comment=comment)


def _source(t: Translation, item: str) -> tuple[dict[str, Any], list[str]]:
    """One source, and the keys that it was made of."""
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
    row_format = table("oumi")["formats"].get(str(name).lower())
    if row_format:
        made["format"] = row_format
    for theirs, ours in table("oumi")["columns"].items():
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

"""Conversions of Axolotl beyond its tables."""

from typing import Any

from framework.converters.tables import (
    apply,
    carry_attention,
    carry_deepspeed_file,
    carry_layer_class,
    carry_optimizer,
    carry_per_epoch,
    carry_schedule,
    carry_share,
    carry_steps,
    leave,
    product,
    put_precision,
    refuse,
    table,
)
from framework.converters.translation import Translation, Why
from framework.schema.choices import ShardingStrategy

TOOL = "Axolotl"
_MASTERS = "sharded training of Axolotl keeps float32 masters"
_PURE = "Axolotl trains weights held in bfloat16; float32 would keep masters, 8 bytes a parameter more with AdamW"


def translate(t: Translation) -> None:
    """Fill the translation. Raises RequestError if it is not a recipe of supervised or preference training."""
    rows, source = table("axolotl"), t.source
    refuse(t, rows)
    carry_optimizer(t, "optimizer")
    carry_steps(t, "max_steps")
    carry_schedule(t, "lr_scheduler", "warmup_ratio", "warmup_steps")
    if source.text("lr_scheduler") != "constant" and not (source.get("warmup_ratio") or source.get("warmup_steps")):
        comment = "Axolotl's default, there at most 100 steps"
        t.put("training.warmup_ratio", 0.03, "warmup_ratio", "warmup_steps", comment=comment)
    carry_attention(t, "attn_implementation")
    _schedule_end(t)
    apply(t, rows, TOOL)
    _batch(t)
    _plugins(t)
    if t.source.strings("unfrozen_parameters"):
        text = "model.freeze_layers: the modules that are not trained; until then all are"
        t.leave("unfrozen_parameters", Why.WRITE, text)
        t.head.append("Axolotl trains only its unfrozen_parameters: name the others under model.freeze_layers")
    _adapter(t)
    _rates(t)
    _sharding(t)
    _precision(t)
    _task(t)
    carry_data(t)
    _recording(t)
    leave(t, rows)


def _schedule_end(t: Translation) -> None:
    share, rate = t.source.number("cosine_min_lr_ratio"), t.source.number("learning_rate")
    if share and rate and t.source.text("lr_scheduler") in ("", "cosine"):
        t.put("training.lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler", "cosine_min_lr_ratio")
        comment = f"{share:g} of the learning rate"
        t.put("training.min_learning_rate", product(share, rate), "cosine_min_lr_ratio", comment=comment)


def _batch(t: Translation) -> None:
    source = t.source
    micro, total = source.number("micro_batch_size"), source.number("batch_size")
    if total and micro and not source.get("gradient_accumulation_steps"):
        count = max(int(total // micro), 1)
        t.put("training.gradient_accumulation_steps", count, "batch_size", comment=f"batch_size {total:g} there")
    else:
        t.leave("batch_size", Why.DEFAULT, "gradient_accumulation_steps goes before it")


def _plugins(t: Translation) -> None:
    """Losses without logits; Liger has its own keys."""
    for plugin in t.source.strings("plugins"):
        if "cut_cross_entropy" in plugin:
            t.put("model.chunked_loss", True, "plugins", comment="the logits are never built, as with its plugin")
        elif not any(name in plugin.lower() for name in ("liger", "swanlab")):
            t.leave("plugins", Why.ABSENT, f"of {plugin.rpartition('.')[2]}")
    if t.is_open("plugins"):
        t.leave("plugins", Why.DEFAULT, "what it adds is switched on by its keys")


def _adapter(t: Translation) -> None:
    source, kind = t.source, t.source.text("adapter")
    if not kind:
        leave(t, table("axolotl")["no_adapter"])
        return
    t.put("training.use_peft", True, "adapter")
    if source.has("peft.loftq_config"):
        t.put("peft.peft_method", "loftq", "peft.loftq_config.loftq_bits")
    apply(t, table("axolotl")["adapter"], TOOL)
    names = source.get("lora_target_modules")
    experts = source.strings("lora_target_parameters")
    if source.get("lora_target_linear") is True:
        t.put("peft.lora_target_modules", ["all-linear"], "lora_target_linear", "lora_target_modules")
        t.leave("lora_target_parameters", Why.DEFAULT, "all-linear takes stacked experts too")
    elif names is not None:
        targets = [*names, *experts] if isinstance(names, list) else names
        t.put("peft.lora_target_modules", targets, "lora_target_modules", "lora_target_parameters")
    four, eight = source.get("load_in_4bit") is True, source.get("load_in_8bit") is True
    if kind == "qlora" or four or eight:
        t.put("peft.q_lora", True, "adapter", "load_in_4bit", "load_in_8bit")
        if eight and not four and kind != "qlora":
            t.put("peft.q_lora_bits", 8, "load_in_8bit")
        elif source.get("bnb_config_kwargs.bnb_4bit_use_double_quant") is not False:
            comment = "Axolotl's default"
            t.put("peft.use_bnb_nested_quant", True, "bnb_config_kwargs.bnb_4bit_use_double_quant", comment=comment)


def _rates(t: Translation) -> None:
    """Rates of some weights: Axolotl matches names that contain a text, ours match parts of names."""
    source, groups, used = t.source, list[dict[str, Any]](), list[str]()
    for item in source.items("lr_groups"):
        rate = source.number(f"{item}.lr")
        groups += [{"match": name, "learning_rate": rate} for name in source.strings(f"{item}.modules") if rate]
        used += [f"{item}.name", f"{item}.lr", f"{item}.modules"]
    saved = source.strings("lora_modules_to_save")
    rate = source.number("embedding_lr")
    if rate and (not source.text("adapter") or "embed_tokens" in saved):
        groups.append({"match": "embed_tokens", "learning_rate": rate})
        used.append("embedding_lr")
    if groups:
        t.put("training.parameter_groups", groups, *used)


def _sharding(t: Translation) -> None:
    source = t.source
    carry_deepspeed_file(t)
    flags = [flag for text in source.strings("fsdp") for flag in text.upper().split()]
    keys = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in source.below("fsdp_config")}
    if flags or keys:
        t.put("fsdp.enable_fsdp", True, "fsdp", *keys.values(), comment="start it with --nproc N")
        for strategy in set(flags) & {str(choice) for choice in ShardingStrategy}:
            t.put("fsdp.sharding_strategy", strategy, "fsdp")
        if "OFFLOAD" in flags:
            t.put("fsdp.cpu_offload", True, "fsdp")
    if "reshard_after_forward" in keys:
        kept = source.get(keys["reshard_after_forward"]) is False
        strategy = "SHARD_GRAD_OP" if kept else "FULL_SHARD"
        t.put("fsdp.sharding_strategy", strategy, keys["reshard_after_forward"])
    for name, ours in table("axolotl")["sharded"].items():
        if name in keys:
            t.carry(keys[name], ours)
    if "transformer_layer_cls_to_wrap" in keys:
        carry_layer_class(t, keys["transformer_layer_cls_to_wrap"])
    if "activation_checkpointing" in keys and source.get(keys["activation_checkpointing"]) is True:
        of = (keys["activation_checkpointing"], "gradient_checkpointing")
        t.put("training.enable_gradient_checkpointing", True, *of)


def _precision(t: Translation) -> None:
    """Axolotl loads frozen and trained weights in bfloat16 if `bf16` is set; sharded ones get float32 masters."""
    source = t.source
    fp16 = source.get("fp16") is True or source.get("float16") is True
    is_unsaid = "bf16" not in source.leaves and not fp16  # `auto` is its default
    bf16 = source.get("bf16") in (True, "auto", "full") or source.get("bfloat16") is True or is_unsaid
    of = [key for key in ("bf16", "bfloat16", "fp16", "float16", "torch_dtype") if source.get(key) not in (None, False)]
    if not (bf16 or fp16):
        if not source.text("torch_dtype"):
            put_precision(t, "float32", "none", "bf16", "fp16")
            return
        bf16 = source.text("torch_dtype") in ("bfloat16", "bf16")
    word, dtype = ("bf16", "bfloat16") if bf16 else ("fp16", "float16")
    if t.has("training.use_peft", True):
        put_precision(t, dtype, word, *of)
    elif not bf16 or t.has("fsdp.enable_fsdp"):
        put_precision(t, "float32", word, *of, comment=_MASTERS if bf16 else "fp16 needs float32 masters")
    else:
        put_precision(t, dtype, "none", *of, comment=_PURE)


def _task(t: Translation) -> None:
    rows, word = table("axolotl"), t.source.text("rl")
    if t.has("training.task", "reward"):
        leave(t, rows["reward"])
    if t.source.has("pretraining_dataset"):
        t.put("training.task", "pretrain", *t.source.below("pretraining_dataset"))
    if word:
        t.put("training.task", "preference", "rl")
        t.put("training.preference.loss_type", word, "rl")
        apply(t, rows["preference"], TOOL)
        if word == "simpo" and not t.has("training.preference.beta"):
            t.put("training.preference.beta", 0.1, comment="Axolotl's default, TRL's")


def _recording(t: Translation) -> None:
    """Evaluation, checkpoints and trackers."""
    source = t.source
    if t.has("data.eval") or t.has("data.eval_fraction"):
        rows = t.entries["training.per_device_train_batch_size"].value
        if source.get("eval_batch_size") is None:
            t.put("training.per_device_eval_batch_size", rows, "micro_batch_size", comment="that of training, as there")
        carry_per_epoch(t, "evals_per_epoch", "training.eval_steps")
        t.carry("early_stopping_patience", "training.early_stopping_patience")
    carry_per_epoch(t, "saves_per_epoch", "training.save_steps")
    for key, ours in {"eval_steps": "training.eval_steps", "save_steps": "training.save_steps"}.items():
        if source.number(key):
            t.carry(key, ours)
    _trackers(t)


def _trackers(t: Translation) -> None:
    """Trackers by the keys that enable them; the first one sets the project and the run name."""
    used: dict[str, list[str]] = {}
    for tracker, (asking, project, run) in table("axolotl")["trackers"].items():
        if keys := [key for key in asking.split() if t.source.get(key)]:
            used[tracker] = keys
            for theirs, ours in {project: "training.tracker_project", run: "training.run_name"}.items():
                if ours not in t.entries:
                    t.carry(theirs, ours)
    if used:
        t.put("training.trackers", list(used), *(key for keys in used.values() for key in keys))


LENGTHS = {"drop": "drop", "truncate": "right", "raise": "error"}
_PAIRS = ("chosen", "rejected")
CARRIED = (
    "path", "name", "split", "type", "field", "field_messages", "field_chosen", "field_rejected",
    "message_property_mappings.role", "message_property_mappings.content",
    "message_field_role", "message_field_content",
)  # fmt: skip
"""Keys of a source that ours is made of, except those with an entry."""


def carry_data(t: Translation) -> None:
    """Sources, their formats, the supervised tokens, and the held-out rows."""
    source = t.source
    for section, ours in {"datasets": "train", "pretraining_dataset": "train", "test_datasets": "eval"}.items():
        found, of = [], []
        for item in t.source.items(section):
            made = _source(t, item)
            if made:
                found.append(made)
                of += [f"{item}.{name}" for name in CARRIED if t.is_open(f"{item}.{name}")]
        if found:
            t.put(f"data.{ours}", found, *of)
    if isinstance(source.get("pretraining_dataset"), str):
        t.carry("pretraining_dataset", "data.train", lambda path: [{"path": path}])
    if source.has("pretraining_dataset") and t.has("training.max_steps"):
        t.put("data.streaming", True, comment="Axolotl streams what it pretrains on")
    is_whole = t.has("training.task", "preference") or t.has("training.task", "reward")
    if is_whole and source.get("sample_packing") is True:
        t.leave("sample_packing", Why.ABSENT, "answers are compared as wholes, a sequence each")
    else:
        t.carry("sample_packing", "data.packing")
    _carry_length(t)
    if t.has("data.streaming") or t.has("data.eval"):
        t.leave("val_set_size", Why.WRITE if source.number("val_set_size") else Why.DEFAULT, "data.eval")
    else:
        carry_share(t, "val_set_size")


def _carry_length(t: Translation) -> None:
    """Axolotl drops rows that are too long, but cuts texts of `completion` into several."""
    key, word = "excess_length_strategy", t.source.text("excess_length_strategy") or "drop"
    kinds = {t.source.text(f"{item}.type") for item in t.source.items("datasets")}
    if word in LENGTHS and t.has("data.train") and not kinds & {"completion", "pretrain"}:
        t.put("data.truncation", LENGTHS[word], key, comment="" if t.source.has(key) else "Axolotl's default")


def _source(t: Translation, item: str) -> dict[str, Any]:
    """One source. Values that are not converted are left."""
    get, path = t.source.get, t.source.get(f"{item}.path")
    if not isinstance(path, str):
        return {}
    made: dict[str, Any] = {"path": path}
    files = t.source.strings(f"{item}.data_files")
    if files:
        t.leave(f"{item}.data_files", Why.WRITE, f"the file under `path`, downloaded: {', '.join(files)} of {path}")
    if isinstance(get(f"{item}.name"), str):
        made["name"] = get(f"{item}.name")
    if isinstance(get(f"{item}.split"), str) and get(f"{item}.split") != "train":
        made["split"] = get(f"{item}.split")
    made |= _row_format(t, item)
    leave(t, table("axolotl")["source"], f"{item}.")
    return made


def _row_format(t: Translation, item: str) -> dict[str, Any]:
    """Format and columns of a source, by its `type`."""
    source = t.source
    kind = source.text(f"{item}.type")
    messages, mappings = source.get(f"{item}.field_messages"), f"{item}.message_property_mappings"
    content = source.text(f"{mappings}.content") or source.text(f"{item}.message_field_content")
    if t.has("training.task", "preference") or t.has("training.task", "reward"):
        names = {side: source.get(f"{item}.field_{side}") or side for side in _PAIRS}
        if kind.startswith("chat_template"):
            names["prompt"] = messages or "messages"
        elif not kind.startswith("bradley_terry"):
            text = "columns of this source, from our prompt, chosen and rejected (docs/preference.md) to its own"
            t.leave(f"{item}.type", Why.WRITE, text)
        columns = {ours: theirs for ours, theirs in names.items() if ours != theirs}
        is_unpaired = t.has("training.preference.loss_type", "kto")
        return {"format": "unpaired" if is_unpaired else "preference"} | ({"columns": columns} if columns else {})
    if kind.startswith(("chat_template", "sharegpt")):
        is_sharegpt = content == "value" or kind.startswith("sharegpt")
        row_format, column = ("sharegpt", "conversations") if is_sharegpt else ("messages", "messages")
        theirs = messages or column
        return {"format": row_format} | ({"columns": {column: theirs}} if theirs != column else {})
    if kind == "alpaca":
        return {"format": "alpaca"}
    if kind in ("completion", "pretrain"):
        field = source.get(f"{item}.field") or "text"
        return {"format": "text"} | ({"columns": {"text": field}} if field != "text" else {})
    if source.has(f"{item}.type"):
        text = "format and columns of this source (docs/data.md); until then they are told from its columns"
        t.leave(f"{item}.type", Why.WRITE, text)
    return {}

"""Conversions of litgpt beyond its tables."""

from typing import Any

from framework.converters.tables import apply, leave, table
from framework.converters.translation import Translation, Why


def translate(t: Translation) -> None:
    """Fill the translation. Raises RequestError if the file trains nothing."""
    source = t.source
    if not (source.has("train") and source.has("optimizer")):
        message = "this file trains nothing: it lacks `train` or `optimizer`"
        raise source.refuse("train", message, "a recipe of litgpt finetune_full, finetune_lora or pretrain")
    is_pretraining = source.get("checkpoint_dir") is None
    rows = table("litgpt")
    apply(t, rows, "litgpt")
    _model(t, is_pretraining)
    _devices(t, is_pretraining)
    _batch(t)
    _length_of_run(t, is_pretraining)
    _optimizer(t, is_pretraining)
    _adapter(t)
    _data(t, is_pretraining)
    leave(t, rows)


def _model(t: Translation, is_pretraining: bool) -> None:
    source = t.source
    if not is_pretraining:
        t.carry("checkpoint_dir", "model.model_name", lambda path: str(path).removeprefix("checkpoints/"))
        return
    started = source.get("initial_checkpoint_dir")
    if started:
        t.put("model.model_name", str(started).removeprefix("checkpoints/"), "initial_checkpoint_dir")
    else:
        t.put("model.load_pretrained_weights", False, comment="litgpt pretrain starts from random weights")
        name, shape = str(source.get("model_name")), _written_shape(t)
        known = table("litgpt")["architectures"]
        if shape is None and name not in known:
            raise source.refuse("model_name", f"the shape of {name!r} is not known here", ", ".join(known))
        keys = [f"model_config.{theirs}" for theirs in table("litgpt")["shape"]] if shape else []
        t.put("model.architecture", shape or known[name], "model_name", *keys)
        for key in source.below("model_config"):
            if t.is_open(key):
                t.leave(key, Why.DEFAULT, "as in Llama")
    folder = source.get("tokenizer_dir")
    if folder:
        t.put("model.tokenizer_name", str(folder).removeprefix("checkpoints/"), "tokenizer_dir")


def _written_shape(t: Translation) -> dict[str, Any] | None:
    """A written-out shape, if it is a Llama's."""
    get = t.source.get
    is_llama = get("model_config.mlp_class_name") == "LLaMAMLP" and get("model_config.norm_class_name") == "RMSNorm"
    if not is_llama:
        return None
    written = {ours: get(f"model_config.{theirs}") for theirs, ours in table("litgpt")["shape"].items()}
    shape = {ours: value for ours, value in written.items() if value}
    is_tied = t.source.get("train.tie_embeddings") is True
    return {"model_type": "llama"} | shape | ({"tie_word_embeddings": True} if is_tied else {})


def _world(t: Translation) -> int:
    """Devices of all nodes; one if `auto` leaves the number to the machine."""
    return int((t.source.number("devices") or 1) * (t.source.number("num_nodes") or 1))


def _devices(t: Translation, is_pretraining: bool) -> None:
    """litgpt shards on several devices, without a key for it, and then recomputes blocks when finetuning."""
    world = _world(t)
    if world <= 1:
        return
    of = ("devices", "num_nodes")
    t.put("fsdp.enable_fsdp", True, *of, comment=f"litgpt shards over {world} devices: start it with --nproc {world}")
    if is_pretraining:
        t.put("fsdp.sharding_strategy", "HYBRID_SHARD", *of)
    else:
        t.put("training.enable_gradient_checkpointing", True, *of, comment="as litgpt does where it shards")


def _batch(t: Translation) -> None:
    """litgpt drops the remainders of its divisions by devices and by rows per device; ours must be exact."""
    source, world = t.source, _world(t)
    micro, total = source.number("train.micro_batch_size") or 1, source.number("train.global_batch_size")
    if total is None:
        return
    count = max(int(total // world // micro), 1)
    made = count * micro * world
    if made == total:
        t.put("training.global_batch_size", int(total), "train.global_batch_size")
    else:
        by = f"{micro:g}" if world == 1 else f"{world} devices and {micro:g}"
        comment = f"litgpt's {total:g} rows a step are {made:g}: it drops the rest of the division by {by}"
        t.put("training.gradient_accumulation_steps", count, "train.global_batch_size", comment=comment)
    every = source.number("train.log_interval") or 1
    comment = "litgpt counts micro-batches" if every > 1 else ""
    t.put("training.logging_steps", max(round(every / count), 1), "train.log_interval", comment=comment)


def _length_of_run(t: Translation, is_pretraining: bool) -> None:
    source = t.source
    tokens, rows = source.number("train.max_tokens"), source.number("train.global_batch_size")
    length = source.number("train.max_seq_length")
    if length is None and t.has("model.architecture"):
        length = t.entries["model.architecture"].value.get("max_position_embeddings")
        t.put("model.model_max_length", length, comment="the model's positions, as litgpt takes them")
    if tokens and rows and length and not source.number("train.max_steps"):
        steps = max(int(tokens // (rows * length)), 1)
        comment = f"{tokens:g} tokens / ({rows:g} rows x {length:g})"
        t.put("training.max_steps", steps, "train.max_tokens", comment=comment)
    elif length is None:
        text = "model.model_max_length: no row is cut there; until then the smaller of 2048 and the model's positions"
        t.leave("train.max_seq_length", Why.WRITE, text)
    if tokens and t.is_open("train.max_tokens"):
        t.leave("train.max_tokens", Why.WRITE, "training.max_steps: tokens / (rows of a step x their length)")


def _optimizer(t: Translation, is_pretraining: bool) -> None:
    source = t.source
    name = (source.text("optimizer.class_path") or source.text("optimizer")).rpartition(".")[2]
    if name == "adamw" and source.get("quantize"):
        comment = "litgpt's AdamW of a quantized base"
        t.put("training.optimizer", "paged_adamw_32bit", "optimizer.class_path", "optimizer", comment=comment)
    if "adamw" in name:
        for key, (theirs, value) in table("litgpt")["adamw"].items():
            if source.get(f"optimizer.init_args.{theirs}") is None:
                t.put(f"training.{key}", value, comment="AdamW's default")
    betas = source.get("optimizer.init_args.betas")
    if isinstance(betas, list) and len(betas) == 2:
        t.put("training.adam_beta1", betas[0], "optimizer.init_args.betas")
        t.put("training.adam_beta2", betas[1], "optimizer.init_args.betas")
    low = source.number("train.min_lr")
    if is_pretraining and low:
        t.put("training.lr_scheduler_type", "cosine_with_min_lr")
        t.carry("train.min_lr", "training.min_learning_rate")
    else:
        t.put("training.lr_scheduler_type", "cosine", comment="litgpt's one schedule")
        t.leave("train.min_lr", Why.DEFAULT, "litgpt's finetuning does not read it: its rate ends at 0")
    if is_pretraining and source.get("train.max_norm") is not None:
        t.carry("train.max_norm", "training.max_grad_norm")
    else:
        comment = "litgpt's finetuning does not clip"
        t.put("training.max_grad_norm", 0, "train.max_norm", comment=comment)


def _adapter(t: Translation) -> None:
    source = t.source
    if not source.has("lora_r"):
        return
    t.put("training.use_peft", True)
    apply(t, table("litgpt")["adapter"], "litgpt")
    modules = table("litgpt")["modules"]
    wanted = [key for key in modules if source.get(key) is True]
    if set(wanted) >= set(modules) - {"lora_head"}:
        t.put("peft.lora_target_modules", ["all-linear"], *(key for key in wanted if key != "lora_head"))
        t.leave(
            "lora_head", Why.ABSENT, "all-linear leaves the head out; list the modules with lm_head to adapt it too"
        )
    elif wanted:
        name = t.source.text("checkpoint_dir")
        fused = next((module for part, module in table("litgpt")["fused"].items() if part in name), None)
        targets = [module for key in wanted for module in table("litgpt")["modules"][key]]
        comment = ""
        if fused:
            targets = [fused, *(module for module in targets if module not in ("q_proj", "k_proj", "v_proj"))]
            comment = "transformers keeps queries, keys and values in one matrix: the keys are adapted too"
        t.put("peft.lora_target_modules", targets, *wanted, comment=comment)


def _data(t: Translation, is_pretraining: bool) -> None:
    source, rows = t.source, table("litgpt")
    key = "data" if source.get("data") is not None else "data.class_path"
    kind = str(source.get(key) or "").rpartition(".")[2]
    if is_pretraining:
        t.put("training.task", "pretrain")
    if kind in rows["sources"]:
        made: dict[str, Any] = {"path": rows["sources"][kind], "format": "text" if kind == "TinyStories" else "alpaca"}
        t.put("data.train", [made], key)
    elif kind == "JSON" and source.get("data.init_args.json_path"):
        t.put("data.train", [{"path": source.get("data.init_args.json_path")}], key, "data.init_args.json_path")
    elif kind:
        t.leave(key, Why.WRITE, f"data.train: a file or a dataset of the hub with the rows that {kind} reads")
    if kind in rows["held_out"] and source.get("data.init_args.val_split_fraction") is None:
        t.put(
            "data.eval_fraction",
            rows["held_out"][kind],
            "data.init_args.val_split_fraction",
            comment=f"{kind}'s default",
        )
    if kind and not is_pretraining:
        masked = source.get("data.init_args.mask_prompt") is True
        t.put("data.supervise", "assistant" if masked else "all", "data.init_args.mask_prompt")

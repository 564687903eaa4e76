"""litgpt: the arguments of its commands finetune_full, finetune_lora and pretrain."""

from typing import Any

from framework.converters.translation import Translation, Why
from framework.converters.words import put_precision

SAME = {
    "train.epochs": "training.num_train_epochs",
    "train.max_steps": "training.max_steps",
    "train.micro_batch_size": "training.per_device_train_batch_size",
    "train.lr_warmup_steps": "training.warmup_steps",
    "train.max_seq_length": "model.model_max_length",
    "train.save_interval": "training.save_steps",
    "eval.interval": "training.eval_steps",
    "optimizer.init_args.lr": "training.learning_rate",
    "optimizer.init_args.weight_decay": "training.weight_decay",
    "optimizer.init_args.eps": "training.adam_epsilon",
    "seed": "training.seed",
    "out_dir": "training.output_dir",
}
"""Their key -> ours, where the value means the same."""
LEFT = {
    (Why.DEFAULT, "no text is generated while training; `tunesmith predict` does it afterwards"): "eval.max_new_tokens",
    (Why.WRITE, "a slice in data.eval, such as `split: train[:500]`; all its rows are read"): "eval.max_iters",
    (Why.DEFAULT, "a run is evaluated before its first step and after its last"): (
        "eval.initial_validation eval.final_validation"
    ),
    (Why.DEFAULT, "unsupervised tokens are told by position"): "data.init_args.ignore_index",
    (Why.DEFAULT, "rows are held out by training.seed"): "data.init_args.seed",
    (Why.DEFAULT, "datasets are kept in Hugging Face's cache"): "data.init_args.download_dir",
    (Why.WRITE, "`tunesmith train --nproc N` (docs/many_gpus.md)"): "devices num_nodes",
    (Why.WRITE, "training.warmup_steps: this share of the steps of an epoch"): "train.lr_warmup_fraction",
    (Why.WRITE, "`tunesmith train --resume`"): "resume",
    (Why.DEFAULT, "the tokenizer's chat template, else Alpaca's own text"): "data.init_args.prompt_style",
    (Why.DEFAULT, "that of the model's config"): "train.tie_embeddings",
}  # fmt: skip
"""Why something is not carried -> the keys."""
QUANTISED = {
    "bnb.nf4": ("nf4", False),
    "bnb.nf4-dq": ("nf4", True),
    "bnb.fp4": ("fp4", False),
    "bnb.fp4-dq": ("fp4", True),
}
SOURCES = {
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "Alpaca": "yahma/alpaca-cleaned",
    "TinyStories": "roneneldan/TinyStories",
}
"""Data module -> the dataset of the hub with its rows."""
HELD_OUT = {"Alpaca2k": 0.05, "Alpaca": 0.03865}
"""Data module -> its `val_split_fraction` where none is written (litgpt/data, 2026-11)."""
_LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "pythia-14m": {
        "model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 512,
    },
    "tiny-llama-1.1b": {
        **_LLAMA, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "micro-llama-300M": {
        **_LLAMA, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
}  # fmt: skip
"""Names in litgpt/config.py of models that its recipes pretrain -> that shape as transformers writes it."""
_SHAPE = {
    "padded_vocab_size": "vocab_size", "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_query_groups": "num_key_value_heads", "intermediate_size": "intermediate_size",
    "block_size": "max_position_embeddings", "head_size": "head_dim",
}  # fmt: skip
"""litgpt.Config of a Llama -> LlamaConfig."""
_OF_ADAMW = {"learning_rate": ("lr", 0.001), "weight_decay": ("weight_decay", 0.01)}
"""Our key -> AdamW's argument and its default (torch 2.11, bitsandbytes 0.50)."""
_PARTS = {
    "lora_query": ("q_proj",), "lora_key": ("k_proj",), "lora_value": ("v_proj",), "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"), "lora_head": ("lm_head",),
}  # fmt: skip
_FUSED = {
    "falcon": "query_key_value",
    "pythia": "query_key_value",
    "stablelm-base": "query_key_value",
    "phi-3": "qkv_proj",
}
"""Part of a checkpoint's name -> the one module that holds queries, keys and values in transformers."""


def translate(t: Translation) -> None:
    """Fills the translation. Raises RequestError for a file that trains nothing."""
    source = t.source
    if not (source.has("train") and source.has("optimizer")):
        message = "this file trains nothing: it lacks `train` or `optimizer`"
        raise source.refuse("train", message, "a recipe of litgpt finetune_full, finetune_lora or pretrain")
    is_pretraining = source.get("checkpoint_dir") is None
    t.rename(SAME)
    _model(t, is_pretraining)
    _devices(t, is_pretraining)
    _batch(t)
    _length_of_run(t, is_pretraining)
    _optimizer(t, is_pretraining)
    _precision(t)
    _adapter(t)
    _data(t, is_pretraining)
    name = source.text("logger_name")
    if name in ("wandb", "tensorboard", "mlflow"):
        t.put("training.trackers", [name], "logger_name")
    else:
        t.leave("logger_name", Why.DEFAULT, "metrics.jsonl")
    t.leave_all(LEFT)


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
        if shape or name in ARCHITECTURES:
            keys = [f"model_config.{theirs}" for theirs in _SHAPE] if shape else []
            t.put("model.architecture", shape or ARCHITECTURES[name], "model_name", *keys)
        else:
            raise source.refuse("model_name", f"the shape of {name!r} is not known here", ", ".join(ARCHITECTURES))
        for key in source.below("model_config"):
            if t.is_open(key):
                t.leave(key, Why.DEFAULT, "as in Llama")
    folder = source.get("tokenizer_dir")
    if folder:
        t.put("model.tokenizer_name", str(folder).removeprefix("checkpoints/"), "tokenizer_dir")


def _written_shape(t: Translation) -> dict[str, Any] | None:
    """A shape that is written out, when it is a Llama's."""
    get = t.source.get
    is_llama = get("model_config.mlp_class_name") == "LLaMAMLP" and get("model_config.norm_class_name") == "RMSNorm"
    if not is_llama:
        return None
    shape = {ours: get(f"model_config.{theirs}") for theirs, ours in _SHAPE.items() if get(f"model_config.{theirs}")}
    is_tied = t.source.get("train.tie_embeddings") is True
    return {"model_type": "llama"} | shape | ({"tie_word_embeddings": True} if is_tied else {})


def _world(t: Translation) -> int:
    """Devices of all nodes; one where `auto` leaves them to the machine."""
    return int((t.source.number("devices") or 1) * (t.source.number("num_nodes") or 1))


def _devices(t: Translation, is_pretraining: bool) -> None:
    """Several devices shard, which no key of litgpt's tells; those that finetune recompute blocks then."""
    for key in ("devices", "num_nodes"):
        if t.source.get(key) == 1:
            t.leave(key, Why.DEFAULT, "one")
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
    """litgpt drops the rests of its divisions, by the devices and by the rows of each; ours must be whole."""
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
    comment = "litgpt counts micro batches" if every > 1 else ""
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
    kind = source.text("optimizer.class_path") or source.text("optimizer")
    name = kind.rpartition(".")[2]
    ours = {
        "adamw": "adamw_torch",
        "sgd": "sgd",
        "pagedadamw": "paged_adamw_32bit",
        "pagedadamw8bit": "paged_adamw_8bit",
    }
    if name == "adamw" and source.get("quantize"):
        comment = "litgpt's AdamW of a quantised base"
        t.put("training.optimizer", "paged_adamw_32bit", "optimizer.class_path", "optimizer", comment=comment)
    elif name in ours:
        t.put("training.optimizer", ours[name], "optimizer.class_path", "optimizer")
    else:
        t.leave("optimizer.class_path", Why.WRITE, "training.optimizer; until then it is adamw_torch")
    if "adamw" in name:
        for key, (theirs, value) in _OF_ADAMW.items():
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


def _precision(t: Translation) -> None:
    word = str(t.source.get("precision") or "").lower()
    pairs = {
        "bf16-true": ("bfloat16", "none"), "bf16-mixed": ("float32", "bf16"), "16-mixed": ("float32", "fp16"),
        "32-true": ("float32", "none"), "32": ("float32", "none"),
    }  # fmt: skip
    if word in pairs:
        put_precision(t, *pairs[word], "precision")
    elif word:
        t.leave("precision", Why.WRITE, "model.torch_dtype_str: float32, during training.mixed_precision_dtype: fp16")


def _adapter(t: Translation) -> None:
    source = t.source
    if not source.has("lora_r"):
        return
    t.put("training.use_peft", True)
    t.rename({name: f"peft.{name}" for name in ("lora_r", "lora_alpha", "lora_dropout")})
    wanted = [key for key in _PARTS if source.get(key) is True]
    if set(wanted) >= set(_PARTS) - {"lora_head"}:
        t.put("peft.lora_target_modules", ["all-linear"], *(key for key in wanted if key != "lora_head"))
        t.leave(
            "lora_head", Why.ABSENT, "all-linear leaves the head out; list the modules with lm_head to adapt it too"
        )
    elif wanted:
        _partial_targets(t, wanted)
    kind = source.text("quantize")
    if kind in QUANTISED:
        code, nested = QUANTISED[kind]
        t.put("peft.q_lora", True, "quantize")
        t.put("peft.bnb_4bit_quant_type", code, "quantize")
        t.put("peft.use_bnb_nested_quant", nested, "quantize")
    elif "int8" in kind:
        t.put("peft.q_lora", True, "quantize")
        t.put("peft.q_lora_bits", 8, "quantize")
    elif kind:
        t.leave("quantize", Why.WRITE, "peft.q_lora: true")
    if source.text("precision") == "bf16-true":
        t.put("peft.adapter_dtype", "auto", "precision", comment="that of the base, as there; unset it is float32")


def _partial_targets(t: Translation, wanted: list[str]) -> None:
    name = t.source.text("checkpoint_dir")
    fused = next((module for part, module in _FUSED.items() if part in name), None)
    targets = [module for key in wanted for module in _PARTS[key]]
    comment = ""
    if fused:
        targets = [fused, *(module for module in targets if module not in ("q_proj", "k_proj", "v_proj"))]
        comment = "transformers keeps queries, keys and values in one matrix: the keys are adapted too"
    t.put("peft.lora_target_modules", targets, *wanted, comment=comment)


def _data(t: Translation, is_pretraining: bool) -> None:
    source = t.source
    key = "data" if source.get("data") is not None else "data.class_path"
    kind = str(source.get(key) or "").rpartition(".")[2]
    if is_pretraining:
        t.put("training.task", "pretrain")
    if kind in SOURCES:
        made: dict[str, Any] = {"path": SOURCES[kind], "format": "text" if kind == "TinyStories" else "alpaca"}
        t.put("data.train", [made], key)
    elif kind == "JSON" and source.get("data.init_args.json_path"):
        t.put("data.train", [{"path": source.get("data.init_args.json_path")}], key, "data.init_args.json_path")
    elif kind:
        t.leave(key, Why.WRITE, f"data.train: a file or a dataset of the hub with the rows that {kind} reads")
    t.carry("data.init_args.val_split_fraction", "data.eval_fraction")
    if kind in HELD_OUT and source.get("data.init_args.val_split_fraction") is None:
        t.put("data.eval_fraction", HELD_OUT[kind], "data.init_args.val_split_fraction", comment=f"{kind}'s default")
    t.carry("data.init_args.num_workers", "data.workers")
    if kind and not is_pretraining:
        masked = source.get("data.init_args.mask_prompt") is True
        t.put("data.supervise", "assistant" if masked else "all", "data.init_args.mask_prompt")

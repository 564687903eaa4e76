"""torchtune: each part names the code that builds it (`_component_`), whose defaults count too."""

import re
from typing import Any

from framework.converters.translation import Translation, Why

SAME = {
    "epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "optimizer.lr": "training.learning_rate",
    "lr_scheduler.num_warmup_steps": "training.warmup_steps",
    "enable_activation_checkpointing": "training.enable_gradient_checkpointing",
    "enable_activation_offloading": "training.activation_offload",
    "optimizer_in_bwd": "training.optimizer_in_backward",
    "compile": "training.compile",
    "seed": "training.seed",
    "output_dir": "training.output_dir",
    "log_every_n_steps": "training.logging_steps",
    "run_val_every_n_steps": "training.eval_steps",
    "tensor_parallel_dim": "fsdp.tensor_parallel_size",
    "checkpointer.keep_last_n_checkpoints": "training.save_total_limit",
}
"""Their key -> ours, where the value means the same."""
LEFT = {
    (Why.DEFAULT, "a checkpoint is found by its folder's index"): (
        "checkpointer.checkpoint_files checkpointer.model_type checkpointer.adapter_checkpoint "
        "checkpointer.recipe_checkpoint checkpointer._component_ checkpointer.output_dir"
    ),
    (Why.DEFAULT, "the reference is the model as it was before training"): "ref_checkpointer base_model_path",
    (Why.DEFAULT, "the tokenizer comes with the model"): (
        "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.merges_path tokenizer.vocab_path "
        "tokenizer.prompt_template"
    ),
    (Why.ABSENT, "torch's profiler; `tunesmith report` has memory and time of every phase"): "profiler",
    (Why.NOT_OURS, "quantisation-aware training, and quantised exports"): "quantizer fake_quant_after_n_steps",
    (Why.DEFAULT, "metrics.jsonl has them"): "log_peak_memory_stats log_level metric_logger.log_dir",
    (Why.WRITE, "`tunesmith train --resume`"): "resume_from_checkpoint",
    (Why.DEFAULT, "`gpu=` names a card, each process has one"): "device",
    (Why.DEFAULT, "a load holds no more than one unit next to the model"): "low_cpu_ram",
    (Why.DEFAULT, "embeddings and head are split too"): "custom_sharded_layers",
    (Why.DEFAULT, "the plan of the model in transformers"): "tensor_parallel_plan",
    (Why.DEFAULT, "rows are padded to the longest of their micro batch"): "collate_fn",
    (Why.DEFAULT, "peft.peft_save_mode says what is exported; a checkpoint has all that training goes on from"): (
        "save_adapter_weights_only"
    ),
}  # fmt: skip
"""Why something is not carried -> the keys."""
OPTIMIZERS = {
    "AdamW": "adamw_torch", "PagedAdamW": "paged_adamw_32bit", "PagedAdamW8bit": "paged_adamw_8bit",
    "AdamW8bit": "adamw_8bit", "SGD": "sgd", "Lion": "lion", "Lion8bit": "lion_8bit",
}  # fmt: skip
_DECAYING = ("AdamW", "PagedAdamW", "PagedAdamW8bit", "AdamW8bit", "AdamW4bit")
"""Their `weight_decay` is 0.01 where it is not written (torch 2.11, bitsandbytes 0.50)."""
SOURCES = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "preference"),
    "gsm8k_sft": ("openai/gsm8k", "prompt_completion"),
}
"""Builder -> its `source` where none is written, and our form of its rows."""
_COLUMNS = {
    "stack_exchange_paired_dataset": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    "gsm8k_sft": {"prompt": "question", "completion": "answer"},
}
_FORMS = {
    "instruct_dataset": "prompt_completion", "text_completion_dataset": "text", "preference_dataset": "preference",
}  # fmt: skip
_STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}
"""`conversation_style` of `chat_dataset` -> our form of its rows, and the column of it."""
_NAMED = {
    "instruct_dataset": {"prompt": ("column_map.input", "input"), "completion": ("column_map.output", "output")},
    "text_completion_dataset": {"text": ("column", "text")},
}
"""Builder -> our column, their key that names it, and its name where none is written (torchtune/datasets, 2026-11)."""
_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_LEARNS_PROMPTS = "torchtune's Alpaca learns the prompts too"


def component(t: Translation, section: str) -> str:
    """Last part of the name of the code that builds a section."""
    value = t.source.get(f"{section}._component_")
    return value.rpartition(".")[2] if isinstance(value, str) else ""


def translate(t: Translation) -> None:
    """Fills the translation. Raises RequestError for what is not a recipe of supervised or preference training."""
    _refuse(t)
    source = t.source
    t.rename(SAME)
    _model(t)
    _optimizer(t)
    _adapter(t)
    _task(t)
    _data(t)
    _sharding(t)
    steps = source.number("max_steps_per_epoch")
    if steps:
        count = int(steps * (source.number("epochs") or 1))
        t.put("training.max_steps", count, "max_steps_per_epoch", "epochs", comment="steps an epoch x epochs")
    if source.get("optimizer_in_bwd") is True:
        t.put("training.gradient_accumulation_steps", 1, "gradient_accumulation_steps")
    logger = component(t, "metric_logger").lower()
    tracker = next((name for name in ("wandb", "tensorboard") if logger.startswith(name)), None)
    if tracker:
        t.put("training.trackers", [tracker], "metric_logger._component_")
    else:
        t.leave("metric_logger._component_", Why.DEFAULT, "metrics.jsonl")
    t.leave(
        "shuffle", Why.DEFAULT if source.get("shuffle") else Why.ABSENT, "rows are always shuffled, by training.seed"
    )
    t.leave_all(LEFT)


def _refuse(t: Translation) -> None:
    source = t.source
    names = " ".join(str(leaf.value) for key, leaf in source.leaves.items() if key.endswith("_component_"))
    rollouts = ("reward_functions", "grpo_samples", "ppo_epochs", "reward_checkpointer", "value_model")
    if key := next((name for name in rollouts if source.has(name)), None):
        raise source.refuse(key, "reinforcement learning from rollouts is not ours for now", "an SFT or DPO recipe")
    if "multimodal" in names or "vision" in names or source.get("tokenizer.image_size"):
        key = "model._component_"
        raise source.refuse(key, "models and rows with images are not ours for now", "a recipe on text")
    if not (source.has("optimizer") and source.has("model")):
        message = "this file trains nothing: it has no optimizer (evaluation, generation and quantisation have none)"
        raise source.refuse("model", message, "a recipe of full_finetune, lora_finetune, lora_dpo or their like")


def _folder(t: Translation, key: str) -> str | None:
    """A checkpoint's folder; torchtune's examples download to /tmp."""
    value = t.source.get(key)
    return value.rstrip("/") if isinstance(value, str) else None


def _model(t: Translation) -> None:
    source, key = t.source, "checkpointer.checkpoint_dir"
    comment = f"torchtune's {component(t, 'model')}; a hub id works too"
    t.put("model.model_name", _folder(t, key), key, "model._component_", comment=comment)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}.get(source.text("dtype"))
    if dtype:
        t.put("model.torch_dtype_str", dtype, "dtype")
        t.put("training.mixed_precision_dtype", "none", "dtype")
    else:
        t.leave("dtype", Why.WRITE, "model.torch_dtype_str: float32, during training.mixed_precision_dtype: fp16")
    if source.number("tokenizer.max_seq_len"):
        t.carry("tokenizer.max_seq_len", "model.model_max_length")
    else:
        text = "model.model_max_length: no row is cut there; until then the smaller of 2048 and the model's positions"
        t.leave("tokenizer.max_seq_len", Why.WRITE, text)
    written = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len", "norm_eps")
    for name in written:
        t.leave(f"model.{name}", Why.DEFAULT, "the model's own config, which comes with its checkpoint")
    loss = component(t, "loss")
    if "Chunked" in loss or loss.startswith("Linear"):
        t.put("model.chunked_loss", True, "loss._component_")


def _optimizer(t: Translation) -> None:
    source, kind = t.source, component(t, "optimizer")
    name = OPTIMIZERS.get(kind)
    if source.text("optimizer._component_").startswith("torchao."):
        name = {"AdamW8bit": "adamw_torchao_8bit", "AdamW4bit": "adamw_torchao_4bit"}.get(kind)
    if name == "adamw_torch" and source.get("optimizer.fused") is True:
        name = "adamw_torch_fused"
    if name:
        t.put("training.optimizer", name, "optimizer._component_", "optimizer.fused")
    else:
        t.leave("optimizer._component_", Why.WRITE, "training.optimizer; until then it is adamw_torch")
    if source.get("optimizer.weight_decay") is not None:
        t.carry("optimizer.weight_decay", "training.weight_decay")
    elif kind in _DECAYING:
        t.put("training.weight_decay", 0.01, comment=f"the default of {kind}")
    if kind in _DECAYING and source.get("optimizer.lr") is None:
        t.put("training.learning_rate", 0.001, comment=f"the default of {kind}")
    betas = source.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        t.put("training.adam_beta1", betas[0], "optimizer.betas")
        t.put("training.adam_beta2", betas[1], "optimizer.betas")
    t.carry("optimizer.eps", "training.adam_epsilon")
    schedule = component(t, "lr_scheduler")
    if "cosine" in schedule:
        t.put("training.lr_scheduler_type", "cosine", "lr_scheduler._component_")
    elif not schedule:
        t.put("training.lr_scheduler_type", "constant", comment="there is no schedule")
    else:
        t.leave("lr_scheduler._component_", Why.WRITE, "training.lr_scheduler_type; until then linear")
    clip = source.get("clip_grad_norm")
    comment = "" if clip else "torchtune clips only where it is told"
    t.put("training.max_grad_norm", clip or 0, "clip_grad_norm", comment=comment)


def _adapter(t: Translation) -> None:
    source, kind = t.source, component(t, "model")
    names = source.strings("model.lora_attn_modules")
    if not names:
        return
    t.put("training.use_peft", True, "model._component_")
    t.carry("model.lora_rank", "peft.lora_r")
    t.carry("model.lora_alpha", "peft.lora_alpha")
    t.carry("model.lora_dropout", "peft.lora_dropout")
    of = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    targets = [_MODULES.get(name, name) for name in names]
    targets += _MLP if source.get("model.apply_lora_to_mlp") is True else []
    targets += ["lm_head"] if source.get("model.apply_lora_to_output") is True else []
    fused = {"q_proj", "k_proj", "v_proj"} if kind.startswith(("lora_phi3", "lora_phi4", "qlora_phi")) else set()
    if fused:
        targets = [name for name in targets if name not in (*fused, "gate_proj", "up_proj")]
        targets = ["qkv_proj", *targets, *(["gate_up_proj"] if "down_proj" in targets else [])]
    comment = "transformers keeps these matrices in one" if fused else ""
    t.put("peft.lora_target_modules", targets, *of, comment=comment)
    if source.get("model.use_dora") is True:
        t.put("peft.peft_method", "dora", "model.use_dora")
    if kind.startswith("qlora") or source.get("model.quantize_base") is True:
        t.put("peft.q_lora", True, "model._component_", "model.quantize_base")
        comment = "torchtune's nf4 has quantised scales"
        t.put("peft.use_bnb_nested_quant", True, "model._component_", comment=comment)
    if source.text("dtype") == "bf16":
        t.put("peft.adapter_dtype", "auto", "dtype", comment="that of the base, as there; unset it is float32")


def _task(t: Translation) -> None:
    source, loss = t.source, component(t, "loss")
    if loss == "DPOLoss":
        t.put("training.task", "preference", "loss._component_")
        t.carry("loss.beta", "training.preference.beta")
        t.carry("loss.label_smoothing", "training.preference.label_smoothing")
    if not source.has("teacher_model"):
        if t.is_open("loss._component_"):
            t.leave("loss._component_", Why.DEFAULT, "cross entropy of the next token")
        return
    t.put("training.task", "distillation", "teacher_model._component_")
    teacher = _folder(t, "teacher_checkpointer.checkpoint_dir")
    t.put("training.teacher.model_name", teacher, "teacher_checkpointer.checkpoint_dir", "teacher_model._component_")
    t.carry("kd_ratio", "training.distillation.alpha")
    kinds = {"reverse": "reverse_kl", "symmetric": "jsd"}
    word = component(t, "kd_loss").lower()
    kind = next((ours for name, ours in kinds.items() if word.startswith(name)), "forward_kl")
    t.put("training.distillation.divergence", kind, "kd_loss._component_")
    t.leave("loss._component_", Why.DEFAULT, "cross entropy of the labels has the rest of the weight")
    for key in source.below("teacher_checkpointer"):
        if t.is_open(key):
            t.leave(key, Why.DEFAULT, "a checkpoint is found by its folder's index")
    t.leave("teacher_model.lora_attn_modules", Why.DEFAULT, "a teacher is not trained")


def _data(t: Translation) -> None:
    source = t.source
    for section, ours in {"dataset": "data.train", "dataset_val": "data.eval"}.items():
        kind = component(t, section)
        if not kind:
            continue
        path, form = SOURCES.get(kind, (None, _FORMS.get(kind)))
        made = {"path": source.get(f"{section}.source") or path}
        if made["path"] is None or source.has(f"{section}.data_files"):
            made["path"] = source.get(f"{section}.data_files") or made["path"]
        if made["path"] is None:
            text = f"{ours}: the rows that {kind} reads"
            t.leave(f"{section}._component_", Why.WRITE, text)
            continue
        split = source.get(f"{section}.split")
        made |= {"split": split} if split not in (None, "train") else {}
        made |= {"format": form} if form else {}
        shape, named = _rows(t, section, kind)
        keys = [f"{section}.{name}" for name in ("_component_", "source", "data_files", "split")]
        t.put(ours, [made | shape], *keys, *named)
        learns = source.get(f"{section}.train_on_input")
        if section == "dataset" and (learns is True or (form == "alpaca" and learns is None)):
            comment = "" if learns else _LEARNS_PROMPTS
            t.put("data.supervise", "all", f"{section}.train_on_input", comment=comment)
    t.carry("dataset.packed", "data.packing")
    if source.number("batch_size_val"):
        t.carry("batch_size_val", "training.per_device_eval_batch_size")
    partition = re.fullmatch(r"(\d+)-(\d+)/(\d+)", source.text("dataset.partition"))
    if partition and int(partition[3]) and t.has("data.train"):
        first, last, parts = map(int, partition.groups())
        start, end = round(100 * first / parts), round(100 * (last + 1) / parts)
        one = t.entries["data.train"].value[0]
        row = {**one, "split": f"{one.get('split', 'train')}[{start}%:{end}%]"}
        t.put("data.train", [row], *t.entries["data.train"].of, "dataset.partition")


def _rows(t: Translation, section: str, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Columns of a source, with the form where that follows from them; and the keys that say so."""
    if kind in _COLUMNS:
        return {"columns": _COLUMNS[kind]}, []
    pairs = {ours: (f"{section}.{key}", name) for ours, (key, name) in _NAMED.get(kind, {}).items()}
    shape: dict[str, Any] = {}
    style = _STYLES.get(t.source.text(f"{section}.conversation_style"))
    if kind == "chat_dataset" and style is not None:
        shape["format"], column = style
        pairs[column] = (f"{section}.conversation_column", column)
    columns = {ours: t.source.get(key) or name for ours, (key, name) in pairs.items()}
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    of = [f"{section}.conversation_style", *(key for key, _ in pairs.values())] if pairs else []
    return shape | ({"columns": renamed} if renamed else {}), of


def _sharding(t: Translation) -> None:
    source = t.source
    told = [key for key in ("fsdp_cpu_offload", "custom_sharded_layers", "data_parallel_shard_dim") if source.has(key)]
    if told or source.has("fsdp"):
        t.put("fsdp.enable_fsdp", True, *told, comment="start it with --nproc N")
        t.carry("fsdp_cpu_offload", "fsdp.cpu_offload")
        t.carry("fsdp.cpu_offload", "fsdp.cpu_offload")
        return
    is_of_one = source.get("optimizer_in_bwd") is True or "single_device" in source.label
    if not is_of_one:
        t.head.append(
            "torchtune's distributed recipes shard, which no key tells: then fsdp.enable_fsdp=true, --nproc N"
        )

"""Conversions of torchtune beyond its tables."""

import re
from typing import Any

from framework.converters.tables import apply, leave, refuse, table
from framework.converters.translation import Translation, Why

TOOL = "torchtune"
_PROMPTS_TOO = "torchtune's Alpaca trains on the prompts too"


def component(t: Translation, section: str) -> str:
    """Last part of the name of a section's builder."""
    value = t.source.get(f"{section}._component_")
    return value.rpartition(".")[2] if isinstance(value, str) else ""


def translate(t: Translation) -> None:
    """Fill the translation. Raises RequestError if it is not a recipe of supervised or preference training."""
    rows = table("torchtune")
    refuse(t, rows)
    _refuse_others(t)
    source = t.source
    apply(t, rows, TOOL)
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
    leave(t, rows)


def _refuse_others(t: Translation) -> None:
    source = t.source
    names = " ".join(str(leaf.value) for key, leaf in source.leaves.items() if key.endswith("_component_"))
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
    if source.number("tokenizer.max_seq_len"):
        t.carry("tokenizer.max_seq_len", "model.model_max_length")
    else:
        text = "model.model_max_length: no row is cut there; until then the smaller of 2048 and the model's positions"
        t.leave("tokenizer.max_seq_len", Why.WRITE, text)


def _optimizer(t: Translation) -> None:
    source, kind = t.source, component(t, "optimizer")
    if t.has("training.optimizer", "adamw_torch") and source.get("optimizer.fused") is True:
        t.put("training.optimizer", "adamw_torch_fused", "optimizer._component_", "optimizer.fused")
    if kind in table("torchtune")["decaying"]:
        for key, value in {"weight_decay": 0.01, "learning_rate": 0.001}.items():
            if not t.has(f"training.{key}"):
                t.put(f"training.{key}", value, comment=f"the default of {kind}")
    betas = source.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        t.put("training.adam_beta1", betas[0], "optimizer.betas")
        t.put("training.adam_beta2", betas[1], "optimizer.betas")


def _adapter(t: Translation) -> None:
    source, kind = t.source, component(t, "model")
    names = source.strings("model.lora_attn_modules")
    if not names:
        return
    t.put("training.use_peft", True, "model._component_")
    apply(t, table("torchtune")["adapter"], TOOL)
    of = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    targets = [table("torchtune")["modules"].get(name, name) for name in names]
    targets += ["gate_proj", "up_proj", "down_proj"] if source.get("model.apply_lora_to_mlp") is True else []
    targets += ["lm_head"] if source.get("model.apply_lora_to_output") is True else []
    fused = {"q_proj", "k_proj", "v_proj"} if kind.startswith(("lora_phi3", "lora_phi4", "qlora_phi")) else set()
    if fused:
        targets = [name for name in targets if name not in (*fused, "gate_proj", "up_proj")]
        targets = ["qkv_proj", *targets, *(["gate_up_proj"] if "down_proj" in targets else [])]
    comment = "transformers keeps these matrices in one" if fused else ""
    t.put("peft.lora_target_modules", targets, *of, comment=comment)
    if kind.startswith("qlora") or source.get("model.quantize_base") is True:
        t.put("peft.q_lora", True, "model._component_", "model.quantize_base")
        comment = "torchtune's nf4 has quantized scales"
        t.put("peft.use_bnb_nested_quant", True, "model._component_", comment=comment)


def _task(t: Translation) -> None:
    if t.has("training.task", "preference"):
        apply(t, table("torchtune")["preference"], TOOL)
    if t.source.has("teacher_model"):
        t.put("training.task", "distillation", "teacher_model._component_")
        key = "teacher_checkpointer.checkpoint_dir"
        t.put("training.teacher.model_name", _folder(t, key), key, "teacher_model._component_")
        apply(t, table("torchtune")["distillation"], TOOL)
        leave(t, table("torchtune")["distillation"])


def _data(t: Translation) -> None:
    source, rows = t.source, table("torchtune")
    for section, ours in {"dataset": "data.train", "dataset_val": "data.eval"}.items():
        kind = component(t, section)
        if not kind:
            continue
        path, row_format = rows["sources"].get(kind, (None, rows["formats"].get(kind)))
        made = {"path": source.get(f"{section}.source") or path}
        if made["path"] is None or source.has(f"{section}.data_files"):
            made["path"] = source.get(f"{section}.data_files") or made["path"]
        if made["path"] is None:
            text = f"{ours}: the rows that {kind} reads"
            t.leave(f"{section}._component_", Why.WRITE, text)
            continue
        split = source.get(f"{section}.split")
        made |= {"split": split} if split not in (None, "train") else {}
        made |= {"format": row_format} if row_format else {}
        shape, named = _rows(t, section, kind)
        keys = [f"{section}.{name}" for name in ("_component_", "source", "data_files", "split")]
        t.put(ours, [made | shape], *keys, *named)
        learns = source.get(f"{section}.train_on_input")
        if section == "dataset" and (learns is True or (row_format == "alpaca" and learns is None)):
            comment = "" if learns else _PROMPTS_TOO
            t.put("data.supervise", "all", f"{section}.train_on_input", comment=comment)
    partition = re.fullmatch(r"(\d+)-(\d+)/(\d+)", source.text("dataset.partition"))
    if partition and int(partition[3]) and t.has("data.train"):
        first, last, parts = map(int, partition.groups())
        start, end = round(100 * first / parts), round(100 * (last + 1) / parts)
        one = t.entries["data.train"].value[0]
        row = {**one, "split": f"{one.get('split', 'train')}[{start}%:{end}%]"}
        t.put("data.train", [row], *t.entries["data.train"].of, "dataset.partition")


def _rows(t: Translation, section: str, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Columns of a source, with the format if it follows from them; and the keys that define them."""
    rows = table("torchtune")
    if kind in rows["columns"]:
        return {"columns": rows["columns"][kind]}, []
    pairs = {ours: (f"{section}.{key}", name) for ours, (key, name) in rows["named_columns"].get(kind, {}).items()}
    shape: dict[str, Any] = {}
    style = rows["styles"].get(t.source.text(f"{section}.conversation_style"))
    if kind == "chat_dataset" and style is not None:
        shape["format"], column = style
        pairs[column] = (f"{section}.conversation_column", column)
    columns = {ours: t.source.get(key) or name for ours, (key, name) in pairs.items()}
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    of = [f"{section}.conversation_style", *(key for key, _ in pairs.values())] if pairs else []
    return shape | ({"columns": renamed} if renamed else {}), of


def _sharding(t: Translation) -> None:
    source = t.source
    given = [key for key in ("fsdp_cpu_offload", "custom_sharded_layers", "data_parallel_shard_dim") if source.has(key)]
    if given or source.has("fsdp"):
        t.put("fsdp.enable_fsdp", True, *given, comment="start it with --nproc N")
        apply(t, table("torchtune")["sharded"], TOOL)
        return
    is_of_one = source.get("optimizer_in_bwd") is True or "single_device" in source.label
    if not is_of_one:
        t.head.append(
            "torchtune's distributed recipes shard, which no key tells: then fsdp.enable_fsdp=true, --nproc N"
        )

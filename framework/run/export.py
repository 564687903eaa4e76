"""The final artefact: a folder that plain `from_pretrained` loads, tokenizer and chat template included."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from framework.build.assembly import Assembly
from framework.build.loss import causal_model
from framework.errors import SaveFailed
from framework.run.checkpoint import written_aside


def export(assembly: Assembly, tokenizer: PreTrainedTokenizerBase, target: Path) -> torch.dtype:
    """Write model (or adapter) and tokenizer to `target`, complete or not at all. Returns the dtype written.

    A model is written in its checkpoint's dtype, whatever it was trained in, and `config.json` says the same; an
    adapter is written as it is. The model is cast in place: call this when training is over.
    Raises SaveFailed when the folder cannot be written or does not read back.
    """
    model, causal = assembly.model, causal_model(assembly.model)
    adapted = hasattr(model, "peft_config")
    dtype = assembly.trained[0].dtype if adapted else assembly.export_dtype
    if not adapted:
        causal.to(dtype)
    with written_aside(target) as aside:
        model.save_pretrained(aside)  # type: ignore[operator]
        tokenizer.save_pretrained(aside)
        _verify(aside, dtype, "adapter_model" if adapted else "model")
    return dtype


def _verify(folder: Path, dtype: torch.dtype, stem: str) -> None:
    """Every tensor present once, without a wrapper's prefix, in the dtype that the config states."""
    names: list[str] = []
    for file in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names += stored.keys()
    wrapped = [name for name in names if "_orig_mod." in name or "_checkpoint_wrapped_module." in name]
    if not names or wrapped:
        raise SaveFailed(f"{folder} would not load elsewhere: {len(names)} tensors, wrapped names {wrapped[:3]}")
    config = folder / "config.json"
    if config.exists():
        stated = json.loads(config.read_text()).get("dtype")
        if stated != str(dtype).removeprefix("torch."):
            raise SaveFailed(f"{config} states dtype {stated}, the tensors are {dtype}")

"""Tiny models saved in folders, as a user has them: weights, config, tokenizer."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from framework.build.text.tokenizer import train_tokenizer
from tests.tiny import LLAMA

VOCABULARY = 300


def save_model(folder: Path, of_rows: bool = False, **changes: Any) -> Path:
    """A llama of two layers in `folder`, with its tokenizer; `of_rows`: with a head for two classes."""
    torch.manual_seed(0)
    architecture = AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = AutoModelForSequenceClassification if of_rows else AutoModelForCausalLM
        kind.from_config(architecture).save_pretrained(folder)
    train_tokenizer(["hello world"], VOCABULARY).save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder: Path, part: str, by: float) -> None:
    """Add `by` to every weight whose name holds `part`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: item + by if part in name else item for name, item in tensors.items()}, file, {"format": "pt"})


def split_weights(folder: Path) -> list[str]:
    """The same weights in two files and an index, as large models have them. Returns the files' names."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return sorted(files)

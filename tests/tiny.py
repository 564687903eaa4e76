"""Tiny models and batches that the tests share. Random weights, a few thousand parameters."""

from typing import Any

import torch

from framework.build.assembly import Assembly, assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.memory.resolve import resolve
from framework.schema.config import TrainingConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 128,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
MODERNBERT: dict[str, Any] = {
    **{key: value for key, value in BERT.items() if "dropout" not in key},
    "model_type": "modernbert",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
GEMMA2: dict[str, Any] = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0}


def tiny_config(architecture: dict[str, Any] = LLAMA, **sections: dict[str, Any]) -> TrainingConfig:
    """A resolved config of a random tiny model; `training={...}` and other sections are laid over the defaults. All
    logits at once unless it says otherwise."""
    plain = {"load_pretrained_weights": False, "chunked_loss": False}
    model = {"architecture": architecture, **plain, **sections.pop("model", {})}
    training = {"per_device_train_batch_size": 8, "global_batch_size": 8, **sections.pop("training", {})}
    return resolve(TrainingConfig(training=training, model=model, **sections))


def tiny_assembly(config: TrainingConfig, steps: int = 10) -> Assembly:
    """The config assembled on the CPU from the seed of the config."""
    torch.manual_seed(config.training.seed)
    return assemble(config, read_architecture(config), real_place(torch.device("cpu")), steps)


def unequal_rows(rows: int = 8, length: int = 24, vocabulary: int = 128) -> dict[str, torch.Tensor]:
    """Rows whose counts of supervised tokens differ widely: row i leaves out its first 3 i labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    for index in range(rows):
        labels[index, : 3 * index] = -100
    return {"input_ids": ids, "labels": labels}


def split(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of `size` rows."""
    rows = len(batch["input_ids"])
    return [{name: tensor[i : i + size] for name, tensor in batch.items()} for i in range(0, rows, size)]


def pairs(count: int = 4, length: int = 16, vocabulary: int = 128) -> dict[str, torch.Tensor]:
    """Pairs of answers as a batch: the better ones first. Prompts and answers differ in length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (2 * count, length), generator=generator)
    labels = ids.clone()
    for index in range(count):
        labels[index, : 3 + index] = labels[count + index, : 3 + index] = -100
        ids[count + index, : 3 + index] = ids[index, : 3 + index]
        labels[count + index, length - 1 - index :] = -100
    return {"input_ids": ids, "labels": labels}


def singles(count: int = 8) -> dict[str, torch.Tensor]:
    """Single answers, of which every third is bad."""
    batch = pairs(count // 2)
    return {**batch, "targets": torch.tensor([[float(index % 3 != 0)] for index in range(count)])}


def split_pairs(batch: dict[str, torch.Tensor], size: int, paired: bool = True) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of `size` pairs, or of as many single rows."""
    if not paired:
        return split(batch, size)
    count = len(batch["input_ids"]) // 2
    parts = [[*range(i, i + size), *range(count + i, count + i + size)] for i in range(0, count, size)]
    return [{name: tensor[rows] for name, tensor in batch.items()} for rows in parts]

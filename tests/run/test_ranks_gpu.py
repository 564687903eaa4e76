"""Two cards train one model together: the same losses as one card, in every precision, compiled and checkpointed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.run.several import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
]
STEPS = 50
SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
CASES = {
    "bf16": {"training": {"mixed_precision_dtype": "bf16"}},
    "fp16": {"training": {"mixed_precision_dtype": "fp16"}},
    "compiled": {"training": {"mixed_precision_dtype": "bf16", "compile": True}, "data": {"pad_to_multiple_of": 512}},
    "checkpointed adapter": {
        "training": {"mixed_precision_dtype": "bf16", "enable_gradient_checkpointing": True, "use_peft": True},
        "model": {"chunked_loss": True},
        "fsdp": {"enable_fsdp": True, "sharding_strategy": "NO_SHARD"},
    },
}


def losses(folder: Path, case: str, count: int) -> list[float]:
    """A run through the command, on `count` cards, of the same global batch."""
    sections = CASES[case]
    alone = {} if count > 1 else {"fsdp": {}}
    recipe = {
        "training": {
            **{"task": "pretrain", "max_steps": STEPS, "global_batch_size": 16, "per_device_train_batch_size": 4},
            **{"learning_rate": 3e-4, "output_dir": str(folder), **sections["training"]},
        },
        "model": {
            **{"architecture": SHAPE, "load_pretrained_weights": False, "model_max_length": 512},
            **{"tokenizer": {"train": "bpe", "vocab_size": 2048}, **sections.get("model", {})},
        },
        "data": {"train": [{"path": "python_stdlib"}], "eval_fraction": 0.01, **sections.get("data", {})},
        **{"fsdp": sections.get("fsdp", {}), **alone},
    }
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "framework", "train", str(file), "--nproc", str(count), "--quiet"]
    told = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, env=told, check=True, timeout=550)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("case", CASES)
def test_two_cards_learn_what_one_does(case: str, tmp_path: Path) -> None:
    """Within 1e-3 over 50 steps, with the same global batch."""
    one, two = (losses(tmp_path / str(count), case, count) for count in (1, 2))
    assert len(one) == len(two) == STEPS
    assert two == pytest.approx(one, rel=1e-3)

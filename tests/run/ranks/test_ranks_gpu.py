"""Two cards train one model together: the same losses as one card, in every precision, compiled and checkpointed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from framework.run import trainer
from framework.schema.config import TrainingConfig
from tests.run.oom.test_survive_gpu import settings
from tests.run.several import ROOT, ended, start
from tests.run.test_trainer import corpus, metrics, train  # noqa: F401

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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, env=environment, check=True, timeout=550)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("case", CASES)
def test_two_cards_learn_what_one_does(case: str, tmp_path: Path) -> None:
    """Within 1e-3 over 50 steps, with the same global batch."""
    one, two = (losses(tmp_path / str(count), case, count) for count in (1, 2))
    assert len(one) == len(two) == STEPS
    assert two == pytest.approx(one, rel=1e-3)


def shrinking(corpus: Path, folder: Path, **training: Any) -> TrainingConfig:  # noqa: F811
    """A run of two cards, of the same rows as one card with half the global batch."""
    made = settings(corpus, folder, global_batch_size=64, **training)
    return made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})


def shrinking_as_rank(corpus: str, folder: str, precision: str) -> None:  # noqa: F811
    """Rank 1 has a small part of its card: in the trial, in the first step, and not at all."""
    rank, room, rows = int(os.environ["RANK"]), 1.25 * 2**30, Path(corpus)
    total = torch.cuda.get_device_properties(rank).total_memory if torch.cuda.is_available() else room
    if rank == 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(room / total, 1)
    train(shrinking(rows, Path(folder) / "trial", mixed_precision_dtype=precision))
    trial, trainer.try_longest_rows = trainer.try_longest_rows, lambda session: None
    train(shrinking(rows, Path(folder) / "step", mixed_precision_dtype=precision))
    trainer.try_longest_rows = trial
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0, rank)
    for name in ("trial", "step"):
        [*_, size] = metrics(Path(folder) / name, "per_device_train_batch_size").values()
        sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": 1}
        train(shrinking(rows, Path(folder) / f"{name}-small", mixed_precision_dtype=precision, **sizes))


@pytest.mark.parametrize("precision", ["none", "fp16"])
def test_two_cards_shrink_together_when_one_runs_out(precision: str, corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    """The cap is 1.25 GiB on rank 1 only; both continue with its size, like a run that starts with it."""
    script = "import sys; from tests.run.ranks.test_ranks_gpu import shrinking_as_rank as go; go(*sys.argv[1:])"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(corpus.read_text() * 16)  # 64 packs and more, so that rank 1 has its 32
    both = ended(start(script, str(rows), str(tmp_path), precision), within=500)
    assert [rank.code for rank in both] == [0, 0], both[0].err + both[1].err
    for name in ("trial", "step"):
        memory = json.loads((tmp_path / name / "memory.json").read_text())
        print(precision, name, memory["repairs"])
        assert [repair for repair in memory["repairs"] if "train" in repair["key"]], "the cap is too high to tell"
        assert not json.loads((tmp_path / f"{name}-small" / "memory.json").read_text())["repairs"]
        small = metrics(tmp_path / f"{name}-small")
        assert metrics(tmp_path / name) == pytest.approx(small, rel=2e-3)

"""Host memory of each rank while a model loads in shards, read back."""

import gc
import mmap
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from framework.build.loading import sharded as shard_loader
from framework.run.setup import start as opening
from framework.run.setup.start import HostWatch
from framework.schema.config import TrainingConfig
from tests.run.several import ended, start
from tests.run.test_trainer import corpus, train  # noqa: F401
from tests.tiny import LLAMA

MIB = 1 << 20
LARGE = {**LLAMA, "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 1024}
MODEL = 249
"""Its MiB in float32: a rank of two has half of it, and a block of 22 MB that is whole."""


def test_what_a_load_takes_and_gives_back_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(bytes(64 * MIB))
    gc.collect()  # else what earlier tests left is freed meanwhile
    with HostWatch() as host:
        held = mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have such a block free
        held[::4096] = bytes([1]) * (96 * MIB // 4096)
        deadline = time.monotonic() + 60  # the thread that looks may get no turn on a busy machine
        while host.grown < 90 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        held.close()
        mapped = torch.from_file(str(file), size=8 * MIB, dtype=torch.int64)
        assert int(mapped.sum()) == 0
        seen = opening.own_bytes()
    assert 90 * MIB < host.grown < 140 * MIB, "nor are the pages of a file counted"
    assert seen - opening.own_bytes() < 32 * MIB


def settings(rows: Path, folder: Path) -> TrainingConfig:
    made: dict[str, Any] = {
        "training": {"task": "pretrain", "max_steps": 1, "per_device_train_batch_size": 1, "global_batch_size": 2},
        "model": {"model_name": str(folder / "model"), "torch_dtype_str": "float32", "model_max_length": 32},
        "data": {"train": [{"path": str(rows)}]},
        "fsdp": {"enable_fsdp": True},
        "gpu": {"count": 2},
    }
    made["training"]["output_dir"] = str(folder / "run")
    return TrainingConfig.model_validate(made)


def save_model(folder: Path) -> None:
    """A model in bfloat16, twice as large in float32, with a tokenizer of bytes."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE), dtype=torch.bfloat16).save_pretrained(folder)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=characters[0]).save_pretrained(folder)


def loading_as_rank(rows: str, folder: str) -> None:
    """The model is loaded in parts; then whole on every rank, though that was not asked for."""
    made = settings(Path(rows), Path(folder))
    train(made, dry_run=True, quiet=False)
    shard_loader.needs_whole_model = lambda config: True
    opening.SLACK_BYTES = 0  # all has been imported
    gc.collect()  # else what is left of the first is freed meanwhile
    train(made, dry_run=True, quiet=False)


@pytest.mark.slow
def test_a_rank_that_holds_the_whole_model_is_reported(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(MIB))  # so that what is freed is given back at once
    save_model(tmp_path / "model")
    both = ended(
        start(
            "import sys; from tests.run.setup.test_host_memory import loading_as_rank as go; go(*sys.argv[1:])",
            str(corpus),
            str(tmp_path),
        )
    )
    assert [rank.code for rank in both] == [0, 0], both
    message = re.findall(r"host memory of the first rank grew by \S+ MiB, of others by (\S+) MiB at most", both[0].err)
    parts, whole = map(float, message)
    assert f"the model is {MODEL}" in both[0].err
    assert MODEL / 2 < parts < 0.8 * MODEL
    assert whole > 0.95 * MODEL
    [warned] = re.findall(r"warning   sharded loading: .*", both[0].err)
    assert f"Host memory of rank 1 grew by {whole} MiB" in warned
    assert "requested but not in effect" in warned

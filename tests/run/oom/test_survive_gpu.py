"""A card that really runs out of memory (with a cap): the trial halves, steps are undone, and training continues."""

import gc
import json
from typing import Any

import pytest
import torch

from framework.errors import OutOfMemory
from framework.memory.cards import read_card
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.schema.config import TrainingConfig
from tests.card import capped_card
from tests.run.test_trainer import corpus, metrics, train  # noqa: F401
from tests.tiny import LLAMA

pytestmark = pytest.mark.gpu
WIDE = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": 512}
"""25 million weights: 0.4 GiB with gradients and states; a row of 512 tokens keeps some 0.2 GiB of activations."""


def settings(corpus: Any, folder: Any, **training: Any) -> TrainingConfig:  # noqa: F811
    architecture = {name: value for name, value in WIDE.items() if name != "vocab_size"}
    sizes = {"per_device_train_batch_size": 32, "global_batch_size": 32, "per_device_eval_batch_size": 32}
    common = {"task": "pretrain", "max_steps": 6, "learning_rate": 1e-4, "output_dir": str(folder), "on_oom": "shrink"}
    return TrainingConfig(
        training={**common, **sizes, "mixed_precision_dtype": "none", **training},
        model={
            "architecture": architecture,
            "load_pretrained_weights": False,
            "torch_dtype_str": "float32",
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "model_max_length": 512,
        },
        data={"train": [{"path": str(corpus)}], "eval_fraction": 0.1, "packing": True},
        gpu=read_card("h100_80gb"),
    )


@pytest.fixture
def capped(training: dict[str, Any]) -> Any:
    """A part of the card for this process: activations on the host need less of it."""
    with capped_card((1.0 if "activation_offload" in training else 1.25) * 2**30):
        yield


@pytest.mark.parametrize(
    "training",
    [{}, {"activation_offload": True}, {"mixed_precision_dtype": "fp16"}, {"compile": True}],
    ids=["plain", "offload", "fp16", "compile"],
)
@pytest.mark.parametrize("trial", [True, False], ids=["trial", "in the step"])
def test_a_run_that_does_not_fit_shrinks_and_learns_the_same(
    corpus: Any,  # noqa: F811
    tmp_path: Any,
    capped: None,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    trial: bool,
) -> None:
    if not trial:
        monkeypatch.setattr("framework.run.trainer.try_longest_rows", lambda session: None)
    before = torch.cuda.memory_allocated()
    train(settings(corpus, tmp_path / "run", **training), planner=plan_in_subprocess if trial else None)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    train_repairs = [repair for repair in memory["repairs"] if "train" in repair["key"]]
    print(training, trial, memory["repairs"], memory["measured"]["allocated_bytes"], torch.cuda.memory_allocated())
    assert train_repairs, "the cap is too high for this test to tell"
    torch._dynamo.reset()  # its cache keeps the model that it compiled
    gc.collect()
    left = torch.cuda.memory_allocated() - before  # two cuBLAS workspaces of 32 MiB
    assert left < 96 * 2**20, "nothing of a failed try is left"
    smaller = train_repairs[-1]["after"]
    sizes = {"per_device_train_batch_size": smaller, "per_device_eval_batch_size": 1}
    train(settings(corpus, tmp_path / "small", **{**training, **sizes}))
    assert not json.loads((tmp_path / "small" / "memory.json").read_text())["repairs"], "settles at the same size"
    assert metrics(tmp_path / "run") == pytest.approx(metrics(tmp_path / "small"), rel=2e-3)


def test_a_row_that_does_not_fit_ends_the_run_before_its_first_step(
    corpus: Any,  # noqa: F811
    tmp_path: Any,
) -> None:
    with capped_card(0.3 * 2**30), pytest.raises(OutOfMemory, match="no step was made"):
        train(settings(corpus, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

"""Weights that stand still are counted and reported; the default full fine-tune moves all of them."""

import json

import pytest
import torch

from framework.run import trainer
from framework.run.record.meter import SPAN, Moved, MovedElements, unmoved_warning
from framework.schema.config import TrainingConfig
from framework.schema.rules.precision import NORM_RATE
from tests.tiny import LLAMA

ARCHITECTURE = {key: value for key, value in LLAMA.items() if key != "vocab_size"} | {"tie_word_embeddings": True}
"""Tied, so that tokens which no row has are trained too, as ones to give little chance to."""
PURE = {"torch_dtype_str": "bfloat16"}


@pytest.fixture
def run(tmp_path, capsys):
    rows = tmp_path / "rows.txt"
    rows.write_text("\n".join(f"row {number} of the text" for number in range(60)))

    def train(model=None, **training):
        config = TrainingConfig(
            training={
                "task": "pretrain",
                "max_steps": SPAN,
                "per_device_train_batch_size": 4,
                "output_dir": str(tmp_path / "run"),
                **training,
            },
            model={
                "architecture": ARCHITECTURE,
                "load_pretrained_weights": False,
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "model_max_length": 32,
                **(model or {}),
            },
            data={"train": [{"path": str(rows)}]},
            gpu={"name": "cpu"},
        )
        result = trainer.train(config, planner=None)
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        shares = [(line["changed_share"], line["changed_share_vectors"]) for line in lines if "changed_share" in line]
        return *shares[-1], len(shares), capsys.readouterr().err

    return train


def test_the_default_moves_nearly_every_element_and_every_norm(run):
    share, norms, looks, output = run()
    assert share > 0.95
    assert norms > 0.95
    assert looks == 1
    assert "trained elements" not in output


def test_small_updates_of_plain_bfloat16_round_away_and_it_is_reported(run):
    share, norms, _, output = run(PURE, learning_rate=6e-6, mixed_precision_dtype="none", optimizer="adamw_torch_fused")
    assert share < 0.1
    assert norms == 0
    assert "trained elements and 0.0% of norms and biases changed in the last 50 steps; updates round away" in output


def test_norm_weights_stand_still_at_every_rate_that_is_warned_about():
    one = torch.ones((), dtype=torch.bfloat16)
    assert one - 0.999 * NORM_RATE == 1
    assert one - 1.01 * NORM_RATE < 1


def test_stochastic_rounding_moves_them(run):
    share, norms, _, output = run(
        PURE, learning_rate=1e-4, mixed_precision_dtype="none", optimizer="anyprecision_adamw"
    )
    assert share > 0.5
    assert norms > 0
    assert "trained elements" not in output


def test_a_share_is_of_elements_not_of_tensors():
    large, small = torch.zeros(30, 100), torch.zeros(1000)
    elements = MovedElements([large, small])
    small.add_(1)
    assert elements.measure() == Moved(all=0.25, vectors=1.0)
    assert elements.measure() == Moved(all=0.0, vectors=0.0)
    large[:15] = 1
    assert elements.measure().all == pytest.approx(0.375, abs=0.01)


def test_a_stalled_run_in_float32_is_reported_with_its_learning_rate():
    config = TrainingConfig(training={"learning_rate": 1e-12})
    assert "only 0.0% of the trained elements changed" in unmoved_warning(Moved(0.0, None), config)
    assert "1e-12" in unmoved_warning(Moved(0.0, None), config)
    assert unmoved_warning(Moved(1.0, None), config) is None

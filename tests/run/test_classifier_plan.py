"""Classifiers are planned by the rehearsal of their own step: against what tensors really took on the CPU."""

from typing import Any

import pytest
import torch

from framework.build.batches import full_batch
from framework.memory.planning import make_plan
from framework.run.rehearse import record
from framework.run.step import train_step
from tests.run.cpu_memory import peak_bytes
from tests.tiny import BERT, LLAMA, MODERNBERT, tiny_assembly, tiny_config

WIDE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 512, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**BERT, **WIDE},
    "bert with dropout": {**BERT, **WIDE, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1},
    "modernbert": {**MODERNBERT, **WIDE},
    "llama": {**LLAMA, **WIDE, "num_key_value_heads": 4},
    "textcnn": {"model_type": "textcnn", "hidden_size": 128, "num_filters": 64, "vocab_size": 512},
    "tcn": {"model_type": "tcn", "hidden_size": 64, "num_channels": 128, "num_hidden_layers": 4, "vocab_size": 512},
}
CLOSE = 0.01
"""Largest error of the peak of a step, as reached."""


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, {}) for name in MODELS),
        ("bert", {"use_peft": True}),
        ("llama", {"use_peft": True}),
        ("bert", {"enable_gradient_checkpointing": True}),
        ("tcn", {"enable_gradient_checkpointing": True}),
    ],
)
def test_the_plan_of_a_step_is_what_the_step_takes(name: str, training: dict[str, Any]) -> None:
    peft = {"lora_target_modules": ["all-linear"]} if training.get("use_peft") else {}
    config = tiny_config(
        MODELS[name],
        training={"task": "classification", "per_device_train_batch_size": 8, **training},
        model={"model_max_length": 96},
        data={"labels": ["a", "b", "c"]},
        peft=peft,
    )
    planned = make_plan(record(config))
    assembly = tiny_assembly(config)
    batches = [full_batch(config, torch.full((8, 96), 7))]
    train_step(assembly, batches, 1)  # makes the optimizer's states
    held = [*assembly.model.parameters(), *assembly.model.buffers()]
    held += [value for state in assembly.optimizer.state.values() for value in state.values()]
    before = sum(tensor.untyped_storage().nbytes() for tensor in {id(t): t for t in held}.values())
    measured = before + peak_bytes(lambda: train_step(assembly, batches, 2))
    assert planned.step_peak.allocated_bytes == pytest.approx(measured, rel=CLOSE)

"""Classifiers are planned by the rehearsal of their own step: against what tensors really took on the CPU."""

from typing import Any

import pytest
import torch
import yaml

from framework.build.data.batches import full_batch
from framework.installation import shipped
from framework.memory.cards import read_card
from framework.memory.planning import make_plan
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.grids import chosen, first, slow
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
        *chosen(("bert with dropout", "llama", "textcnn"), ((name, {}) for name in MODELS)),
        ("bert", {"use_peft": True}),
        slow("llama", {"use_peft": True}),
        slow("bert", {"enable_gradient_checkpointing": True}),
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


@pytest.mark.parametrize(
    ("name", "adapted", "total", "trained"),
    first(
        2,
        [
            ("bert_base", False, 109_482_240 + 3 * 768 + 3, None),
            # rank 8 on six matrices a block, and the head next to them: pooler and classifier, twice in the model
            (
                "bert_base",
                True,
                None,
                2 * 8 * (4 * 2 * 768 + 2 * (768 + 3072)) + (768 + 1) * 768 + 3 * 768 + 3,
            ),
            ("llama3.2_1b", False, 1_235_814_400 + 3 * 2048, None),
            ("llama3.2_1b", True, None, 2 * 8 * (2 * 2 * 2048 + 2 * (2048 + 512) + 3 * (2048 + 8192)) + 3 * 2048),
        ],
    ),
)
def test_the_head_is_in_the_plan(name: str, adapted: bool, total: int | None, trained: int | None) -> None:
    model = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())["model"]
    if adapted:  # its blocks are equal, and a few are quick to plan
        model["architecture"]["num_hidden_layers"] = 2
    config = TrainingConfig(
        training={"task": "classification", "per_device_train_batch_size": 2, "use_peft": adapted},
        model={**model, "model_max_length": 32},
        data={"labels": ["a", "b", "c"]},
        gpu=read_card("rtx4090_24gb"),
        peft={"lora_target_modules": ["all-linear"]} if adapted else {},
    )
    planned = make_plan(record(config))
    assert planned.trainable_parameters == (trained or total)
    assert total is None or planned.total_parameters == total
    assert not any("data.labels" in line for line in planned.assumptions)


def test_without_names_of_classes_the_plan_says_how_many_it_takes() -> None:
    training = {"task": "classification", "per_device_train_batch_size": 2}
    unnamed = tiny_config(BERT, training=training, model={"model_max_length": 32}, gpu=read_card("rtx4090_24gb"))
    assert any("the head has 2 outputs" in line for line in make_plan(record(unnamed)).assumptions)

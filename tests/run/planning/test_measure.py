"""The model that is measured: random, whatever the recipe loads."""

import json

import torch

from framework.build.place import real_place
from framework.run.planning.measure import assembled_at_random, synthetic_batches
from framework.schema.config import TrainingConfig
from tests.tiny import LLAMA


def test_a_model_of_a_folder_is_measured_by_its_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    model = {"model_name": str(tmp_path), "model_max_length": 16}
    training = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    config = TrainingConfig.model_validate({"model": model, "training": training, "gpu": {"name": "cpu"}})
    assembly = assembled_at_random(config, real_place(torch.device("cpu")))
    assert sum(item.numel() for item in assembly.model.parameters()) == 2 * 128 * 32 + 32 + 2 * (
        2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    )
    batches = synthetic_batches(assembly)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(3, 16), (3, 16)]

"""On a card: pinned homes, copies next to compute on a stream of their own, and the memory that the plan says."""

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.run.reference import H100
from tests.tiny import LLAMA

pytestmark = pytest.mark.gpu
WIDE = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10, "vocab_size": 4096}


def config(offload: bool, checkpointing: bool) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model": {
                "architecture": WIDE,
                "load_pretrained_weights": False,
                "torch_dtype_str": "bfloat16",
                "offload_frozen_base": offload,
            },
            "training": {
                "use_peft": True,
                "learning_rate": 1e-3,
                "mixed_precision_dtype": "bf16",
                "enable_gradient_checkpointing": checkpointing,
                "per_device_train_batch_size": 4,
                "global_batch_size": 8,
            },
            "peft": {"lora_target_modules": ["all-linear"], "lora_dropout": 0.0},
            "gpu": H100,
        }
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_losses_are_those_of_a_base_on_the_card_and_two_blocks_are_on_it(checkpointing):
    place, losses, peaks, weights = real_place(torch.device("cuda", 0)), [], [], {}
    for offload in (True, False):
        settled, architecture = settle(config(offload, checkpointing))
        torch.manual_seed(0)
        made = assemble(settled, architecture, place, 10)
        own = dict(made.model.named_parameters())
        if offload:
            weights = {name: tensor.detach().cpu().clone() for name, tensor in own.items()}
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        readings = {reading.key: reading for reading in verify(made)}
        if offload:
            assert readings["model.offload_frozen_base"].found == "10/10 blocks, 10 pinned"
        generator = torch.Generator(device="cuda").manual_seed(1)
        ids = torch.randint(0, 4096, (4, 128), device="cuda", generator=generator)
        batches = [{"input_ids": ids, "labels": ids.clone()}] * 2
        torch.cuda.reset_peak_memory_stats()
        losses.append([train_step(made, batches, step).loss for step in range(1, 6)])
        peaks.append(torch.cuda.max_memory_allocated())
        if made.streamed is not None:
            made.streamed.dissolve(made.model)
        del made, own
        torch.cuda.empty_cache()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    planned = [
        plan_in_subprocess(config(offload, checkpointing)).step_peak.allocated_bytes for offload in (True, False)
    ]
    assert peaks == pytest.approx(planned, rel=0.01)

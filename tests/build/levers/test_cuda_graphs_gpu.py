"""Recorded kernels learn what launched ones do, whatever else decides when a block runs and who holds its results."""

from typing import Any

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import FirstStep, verify_first_step
from framework.run.step import eval_step, train_step
from tests.tiny import LLAMA, split, tiny_config, unequal_rows

pytestmark = pytest.mark.gpu
WIDE = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 4}
PURE = {"optimizer": "anyprecision_adamw", "rounding": "stochastic"}
FLOOR = {"optimizer": "anyprecision_adamw_8bit", "optimizer_in_backward": True, "max_grad_norm": 0.0}
LORA = {"use_peft": True, "optimizer": "adamw_torch_fused"}


def losses(records: bool, training: dict[str, Any], peft: dict[str, Any], autocast: str, parts: int) -> list[float]:
    """Six steps of `parts` micro-batches, a pass of evaluation after the third, and the loss of that."""
    shared = {"compile": True, "learning_rate": 1e-2, "mixed_precision_dtype": autocast}
    sizes = {"per_device_train_batch_size": 8 // parts, "global_batch_size": 8}
    model = {"torch_dtype_str": "float32" if autocast == "bf16" else "bfloat16", "model_max_length": 24}
    if records:
        shared |= {"cuda_graphs": True}
    config, architecture = settle(
        tiny_config(
            WIDE,
            training={**shared, **sizes, **training},
            model={**model, "chunked_loss": 64},
            peft=peft,
            data={"pad_to_multiple_of": 24},
        )
    )
    torch.manual_seed(0)
    assembly = assemble(config, architecture, real_place(torch.device("cuda", 0)), 10)
    batch = {name: tensor.cuda() for name, tensor in unequal_rows().items()}
    found = []
    for step in range(1, 7):
        found.append(train_step(assembly, split(batch, 8 // parts), step).loss)
        if step == 1:
            readings = {item.key: item for item in verify_first_step(assembly, FirstStep(((8 // parts, 24),) * parts))}
            assert ("training.cuda_graphs" in readings) is records
        if step == 3:
            sums = eval_step(assembly, batch)
            found.append(float(sums["loss"] / sums["terms"]))
    return found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("training", "peft", "autocast"),
    [
        (PURE, {}, "none"),
        (FLOOR, {}, "none"),
        ({"optimizer": "adamw_torch_fused"}, {}, "bf16"),
        (LORA, {"lora_target_modules": ["all-linear"]}, "none"),
        (LORA, {"lora_target_modules": ["all-linear"], "lora_dropout": 0.1}, "none"),
        (LORA, {"peft_method": "dora", "lora_target_modules": ["all-linear"]}, "none"),
    ],
    ids=["pure", "floor", "masters", "lora", "lora-dropout", "dora"],
)
def test_recorded_kernels_learn_what_launched_ones_do(training, peft, autocast, parts):
    if parts > 1 and training.get("optimizer_in_backward"):
        pytest.skip("updates in backward take one micro-batch a step")
    launched, recorded = (losses(records, training, peft, autocast, parts) for records in (False, True))
    assert recorded == pytest.approx(launched, rel=0.05 if "lora_dropout" in peft else 2e-3)
    assert launched[-1] < launched[0]

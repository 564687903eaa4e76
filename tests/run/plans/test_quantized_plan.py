"""QLoRA measured on an H100 (torch 2.11+cu130, bitsandbytes 0.50.2; h100_truth2.jsonl of 2026-11), and planned."""

import pytest

from framework.compose import compose
from framework.run.rehearsal.rehearse import rehearse
from tests.grids import slow

pytest.importorskip("bitsandbytes")
ROWS = [  # model, tokens a row, rows, checkpointing, nested scales; bytes of max_memory_allocated
    ("llama3.2_1b", 1024, 4, False, True, 14158225408),
    slow("llama3.2_1b", 4096, 1, True, False, 7883619328),
    slow("llama3.2_1b", 512, 1, True, True, 2057132032),
    slow("llama3.1_8b", 2048, 1, True, True, 9996963840),
    slow("llama3.1_8b", 1024, 1, False, True, 13988229120),
]


@pytest.mark.parametrize(("model", "length", "rows", "recomputed", "nested", "measured"), ROWS)
def test_the_plan_is_what_was_measured(write, model, length, rows, recomputed, nested, measured):
    choices = [f"model={model}", "peft=qlora", "gpu=h100_80gb", "optimizer=adamw_torch_fused"]
    keys = {
        "training.per_device_train_batch_size": rows,
        "training.enable_gradient_checkpointing": str(recomputed).lower(),
        "model.model_max_length": length,
        "model.load_pretrained_weights": "false",
        "model.chunked_loss": "false",
        "peft.use_bnb_nested_quant": str(nested).lower(),
    }
    recipe = str(write("training: {max_steps: 3}\n"))
    plan = rehearse(compose(recipe, [*choices, *(f"{key}={value}" for key, value in keys.items())]).config)
    assert plan.step_peak.allocated_bytes == pytest.approx(measured, rel=0.0001)

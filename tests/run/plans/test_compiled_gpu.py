"""Compiled runs on a real card: the plan against what the same step takes, and compiled code that really ran."""

from typing import Any

import pytest

from framework.build.levers.compiled import compiled_regions
from framework.compose import compose
from framework.run.planning import measure as measuring
from framework.run.planning.plan_pool import plan_in_subprocess
from tests.card import measure_apart, own_card
from tests.tiny import LLAMA, tiny_config

pytestmark = pytest.mark.gpu
PURE = ["model.torch_dtype_str=bfloat16", "training.mixed_precision_dtype=none", "training.learning_rate=1e-4"]
CHUNKED = ["model.model_max_length=2048", "model.chunked_loss=1024"]
LORA = ["peft=lora", "model.model_max_length=1024"]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ([*PURE, "model.model_max_length=1024"], 0.002),
        ([*PURE, *CHUNKED], 0.002),
        ([*PURE, *CHUNKED, "training.activation_memory_budget=0.5"], 0.002),
        ([*PURE, *CHUNKED, "training.enable_gradient_checkpointing=true"], 0.02),
        (["model.model_max_length=1024"], 0.01),
        (LORA, 0.01),
        ([*LORA, "training.enable_gradient_checkpointing=true"], 0.02),
    ],
    ids=["pure", "chunked", "budget", "checkpointed", "autocast", "lora", "lora-checkpointed"],
)
def test_a_compiled_run_takes_what_was_planned(write: Any, arguments: list[str], limit: float) -> None:
    recipe = write("schema_version: 1\n")
    base = ["model=llama3.2_1b", "gpu=h100_80gb", "model.load_pretrained_weights=false"]
    base += ["training.per_device_train_batch_size=4", "training.optimizer=adamw_torch_fused", "training.compile=true"]
    config = compose(str(recipe), [*base, *arguments]).config
    plan, found = plan_in_subprocess(config), measure_apart(config)
    print(arguments, plan.step_peak.allocated_bytes, found.allocated_bytes, plan.step, found.step_seconds)
    assert found.allocated_bytes == pytest.approx(plan.step_peak.allocated_bytes, rel=limit)
    assert found.device_bytes <= plan.step_peak.device_bytes_upper


@own_card()
def test_every_block_runs_compiled_code_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor and triton, checkpointed and not; nothing falls back to plain code."""
    built: list[Any] = []
    original = measuring.assemble
    monkeypatch.setattr(
        measuring, "assemble", lambda *given, **named: built.append(original(*given, **named)) or built[-1]
    )
    for checkpointed in (False, True):
        training = {"compile": True, "enable_gradient_checkpointing": checkpointed, "mixed_precision_dtype": "bf16"}
        measuring.measure(tiny_config(LLAMA, training=training, model={"model_max_length": 64}), steps=3)
        regions = compiled_regions(built[-1].model)
        assert len(regions) == 2
        assert all(0 < region.calls == region.compiled_calls for region in regions)
        assert regions[0].compiler.graphs == 1

"""Liger's kernels on a real card: the losses of plain code to the tolerance of bf16, and the plan against the run."""

from typing import Any

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.compose import compose
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.step import train_step
from tests.card import measure_apart, own_card
from tests.tiny import LLAMA, tiny_config, unequal_rows

pytestmark = pytest.mark.gpu
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
BASE = ["gpu=h100_80gb", "model.load_pretrained_weights=false", "training.optimizer=adamw_torch_fused"]
BASE += ["model.model_max_length=2048", "training.per_device_train_batch_size=4", "model.enable_liger_kernel=true"]
PURE = ["model=llama3.2_1b", "model.torch_dtype_str=bfloat16", "training.mixed_precision_dtype=none"]
GC, CHUNKED = "training.enable_gradient_checkpointing=true", "model.chunked_loss=1024"
LORA = ["model=llama3.1_8b", "peft=lora", "training.per_device_train_batch_size=2", CHUNKED, GC]


@pytest.mark.parametrize(
    "arguments",
    [PURE, [*PURE, CHUNKED], [*PURE, CHUNKED, GC], ["model=llama3.2_1b", CHUNKED, "model.model_max_length=1024"], LORA],
    ids=["pure", "chunked", "checkpointed", "autocast", "8b-lora-checkpointed"],
)
def test_a_run_takes_what_was_planned(write: Any, arguments: list[str]) -> None:
    config = compose(str(write("schema_version: 1\n")), [*BASE, *arguments]).config
    plan, found = plan_in_subprocess(config), measure_apart(config)
    print(arguments, plan.step_peak.allocated_bytes, found.allocated_bytes, plan.step, found.step_seconds)
    assert found.allocated_bytes == pytest.approx(plan.step_peak.allocated_bytes, rel=0.01)
    assert found.device_bytes <= plan.step_peak.device_bytes_upper


@own_card()
@pytest.mark.parametrize("changes", [{}, {"enable_gradient_checkpointing": True}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dtype", ["none", "bf16"])
def test_the_losses_are_those_of_plain_code(changes: dict[str, Any], dtype: str) -> None:
    losses = []
    shape = {**LLAMA, "hidden_size": 256, "intermediate_size": 512}
    for with_liger in (False, True):
        training = {"mixed_precision_dtype": dtype, "learning_rate": 1e-3, **changes}
        config = tiny_config(shape, training=training, model={"enable_liger_kernel": with_liger})
        config, architecture = settle(config)
        torch.manual_seed(0)
        assembly = assemble(config, architecture, real_place(torch.device("cuda")), 10)
        verify(assembly)
        batch = {name: tensor.cuda() for name, tensor in unequal_rows().items()}
        losses.append([float(train_step(assembly, [batch], number).loss) for number in range(1, 6)])
    print(losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "none" else 5e-3)

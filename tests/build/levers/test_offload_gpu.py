"""On a card: the same losses with activations on the host as with them on the device, and the peak that was planned."""

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.step import train_step
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

pytestmark = pytest.mark.gpu
SHAPE = {
    **LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}


def config_of(lever):
    training = {"per_device_train_batch_size": 4, "global_batch_size": 8, "optimizer": "adamw_torch_fused", **lever}
    model = {"torch_dtype_str": "bfloat16", "model_max_length": 2048}
    return tiny_config(SHAPE, training=training, model=model, gpu=H100)


@pytest.fixture
def deterministic(monkeypatch):
    """Flash attention sums a query's gradients in any order, unless deterministic algorithms are requested."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(lever, steps=4):
    """(losses, peak bytes) of a few steps on the card."""
    device, config = torch.device("cuda", 0), config_of(lever)
    torch.manual_seed(0)
    assembly = assemble(config, read_architecture(config), real_place(device), steps)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator(device).manual_seed(1)
    losses = []
    for step in range(1, steps + 1):
        tokens = [torch.randint(0, 4096, (4, 2048), device=device, generator=generator) for _ in range(2)]
        batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
        losses.append(train_step(assembly, batches, step).loss)
    return losses, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recompute", [False, True], ids=["all", "inputs"])
def test_offloaded_activations_train_the_same(recompute, deterministic):
    lever = {"enable_gradient_checkpointing": recompute}
    expected, plain = run(lever)
    losses, moved = run({**lever, "activation_offload": True})
    assert losses == expected, "a copy that was read too early or freed too soon"
    assert moved < plain


@pytest.mark.parametrize("recompute", [False, True], ids=["all", "inputs"])
def test_offloaded_activations_take_the_planned_peak(recompute):
    lever = {"enable_gradient_checkpointing": recompute, "activation_offload": True}
    planned = plan_in_subprocess(config_of(lever)).step_peak.allocated_bytes
    assert planned == pytest.approx(run(lever)[1], rel=0.01)


@pytest.mark.parametrize("policy", ["save_attention", "save_matmuls"])
def test_a_policy_keeps_what_was_planned(policy):
    lever = {"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": policy}
    losses, peak = run(lever)
    assert losses == pytest.approx(run({})[0], rel=1e-2)
    assert plan_in_subprocess(config_of(lever)).step_peak.allocated_bytes == pytest.approx(peak, rel=0.01)

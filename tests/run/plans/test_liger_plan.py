"""Plans with Liger's kernels: what an H100 measured with its loss too, and what they save with ours."""

from typing import Any

import pytest

from framework.build import tasks
from framework.build.losses.loss import model_inputs, next_tokens
from framework.build.model.parts import causal_model
from framework.compose import compose
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.rehearsal.rehearse import record

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="liger-kernel needs triton to import, and there are wheels for Linux alone")
GIB = 2**30
BASE = ["gpu=h100_80gb", "model.load_pretrained_weights=false", "training.optimizer=adamw_torch_fused"]
BASE += ["model.model_max_length=2048", "training.per_device_train_batch_size=4", "model.torch_dtype_str=bfloat16"]
PURE = ["model=llama3.2_1b", "training.mixed_precision_dtype=none"]
ON, GC = "model.enable_liger_kernel=true", "training.enable_gradient_checkpointing=true"
LORA = ["model=llama3.1_8b", "peft=lora", "peft.lora_dropout=0", "training.mixed_precision_dtype=bf16"]
LORA += ["training.per_device_train_batch_size=2"]


def plan(write: Any, *arguments: str) -> Plan:
    recipe = write("schema_version: 1\nmodel: {chunked_loss: false}\n")
    return make_plan(record(compose(str(recipe), [*BASE, *arguments]).config))


def ligers_loss(model: Any, batch: Any, observe: Any) -> Any:
    """The loss that the measured runs had."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    causal = causal_model(model)
    hidden = causal.base_model(**model_inputs(model, batch), use_cache=False).last_hidden_state.flatten(0, 1)
    observe("loss")
    targets, head = next_tokens(batch).flatten(), causal.get_output_embeddings().weight
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, head, targets, None, None, -100, 0.0, 0.0, "sum")[0]


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [(PURE, 16.916), ([*PURE, GC], 9.928), pytest.param([*LORA, GC], 17.572, marks=pytest.mark.slow)],
    ids=["1b", "1b-checkpointed", "8b-lora-checkpointed"],
)
def test_with_ligers_loss_the_plan_is_what_was_measured(
    write: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], measured: float
) -> None:
    """H100, torch 2.11, transformers 5.17, liger-kernel 0.8.5."""
    monkeypatch.setattr(tasks, "build_loss", lambda *_: ligers_loss)
    assert plan(write, *arguments, ON).step_peak.allocated_bytes / GIB == pytest.approx(measured, rel=0.0001)


def test_the_kernels_save_activations_with_either_loss_and_take_time(write: Any) -> None:
    """1B, 4 x 2048: 4.06 GiB with all logits at once, where the rest of the peak is the loss."""
    plain, fused = plan(write, *PURE), plan(write, *PURE, ON)
    assert plain.step_peak.allocated_bytes / GIB == pytest.approx(32.104, abs=0.005)
    assert fused.step_peak.allocated_bytes / GIB == pytest.approx(28.041, abs=0.005)
    assert plan(write, *PURE, ON, "model.chunked_loss=1024").step_peak.allocated_bytes / GIB == pytest.approx(
        17.067, abs=0.005
    )
    assert plain.step is not None
    assert fused.step is not None
    assert fused.step.seconds < 0.9 * plain.step.seconds


def test_launches_are_operations_of_their_phase(write: Any) -> None:
    arguments = [*PURE, ON, "model.architecture.num_hidden_layers=2", "model.model_max_length=64"]
    trace = record(compose(str(write("schema_version: 1\n")), [*BASE, *arguments]).config).trace
    seen = {(item.name, item.phase) for item in trace.operations if item.name.startswith("_")}
    assert {("_triton_rope", "forward"), ("_triton_rope", "backward")} <= seen
    assert ("_swiglu_backward_kernel", "backward") in seen
    width, rows = 8192 * 2, 4 * 64
    [moved] = {item.bytes for item in trace.operations if item.name == "_swiglu_backward_kernel"}
    assert moved == 5 * width * rows, "reads three tensors, writes two over them"

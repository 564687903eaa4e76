"""The plan of rows that devices share: a part of the activations, and in each layer the keys of all."""

from typing import Any

import pytest

from framework.errors import RequestError
from framework.memory.bands import Band
from framework.memory.planning import NCCL_BYTES
from framework.memory.trace import EXCHANGE
from framework.run.rehearsal.rehearse import record, rehearse
from framework.schema.config import TrainingConfig
from tests.tiny import GEMMA2, LLAMA, tiny_config

CARD = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "link_bytes_per_second": 4.5e11}
RATES = {"bandwidth_bytes_per_second": 3.35e12, "fp32_flops": 6.7e13, "bf16_flops": 9.9e14, "fp16_flops": 9.9e14}
SHAPE = {**LLAMA, "hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 512, "max_position_embeddings": 4096}
TOKENS, LAYERS, WIDTH = 2048, 3, 128
"""Length of the rows, and width of the keys of all heads."""


def config(count: int, card: dict[str, Any] = CARD, shape: dict[str, Any] = SHAPE, **sections: Any) -> TrainingConfig:
    """One row a step, on one device or on all."""
    kernel = {"attn_implementation": "ring_attention" if count > 1 else "sdpa"}
    model = {**kernel, "model_max_length": TOKENS, "torch_dtype_str": "bfloat16", **sections.pop("model", {})}
    training = {"per_device_train_batch_size": 1, "global_batch_size": 1, "optimizer": "adamw_torch_fused"}
    training |= {"mixed_precision_dtype": "none", **sections.pop("training", {})}
    return tiny_config(shape, gpu={**card, "count": count}, model=model, training=training, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [{}, {"enable_fsdp": True}])
@pytest.mark.parametrize("count", [2, 4])
def test_a_device_has_its_part_of_activations_and_logits(count, fsdp):
    alone, shared = rehearse(config(1)), rehearse(config(count, fsdp=fsdp))
    whole, part = (
        terms.activations + terms.logits_and_loss + terms.temporaries
        for terms in (alone.step_peak.terms, shared.step_peak.terms)
    )
    assert part == pytest.approx(whole / count, rel=0.1)
    assert shared.batch.context == count
    assert shared.batch.world == 1


@pytest.mark.parametrize("checkpoints", [False, True])
def test_keys_and_values_are_gathered_in_each_pass_and_waited_for(checkpoints):
    made = config(4, training={"enable_gradient_checkpointing": checkpoints}, data={"eval_fraction": 0.0})
    trace = record(made).trace
    bytes_of = TOKENS * 2 * WIDTH * 2 * 3 // 4  # of the row, keys and values, bfloat16, less its own
    exchanged = [operation for operation in trace.operations if operation.name == EXCHANGE]
    steps = sum(mark.phase == "optimizer_step" for mark in trace.marks)
    gathers = 3 if checkpoints else 2  # forward, again in backward for the kernel, and for a checkpoint
    assert sum(item.bytes for item in exchanged) == steps * LAYERS * bytes_of * (gathers + 2)  # gradients in float32
    attention = {item.name for item in trace.operations if "attention" in item.name}
    assert attention == {
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    }


def test_a_layer_keeps_no_keys_of_others_and_no_mask():
    """Not even a bool for each query and key of one chunk."""
    shape = {**LLAMA, "vocab_size": 64, "max_position_embeddings": 4096}
    assert max(record(config(2, shape=shape, model={"model_max_length": 4096})).trace.sizes) < 1024 * 1024


def test_time_has_the_exchange_and_speed_is_of_one_device():
    plan = rehearse(config(2, card={**CARD, **RATES}))
    assert plan.step is not None
    assert plan.step.tokens_per_second == pytest.approx(TOKENS / 2 / plan.step.seconds)
    slow = rehearse(config(2, card={**CARD, **RATES, "link_bytes_per_second": 1e7}))
    assert slow.step is not None
    assert slow.step.seconds > 2 * plan.step.seconds
    assert slow.step.bound_by == "communication"


def test_the_plan_says_what_is_shared():
    plan = rehearse(config(4))
    message = "each device has 512 of 2,048 tokens of a row, and gathers keys and values of all of them in each layer"
    assert message in plan.assumptions
    assert plan.step_peak.terms.overhead == 2 * NCCL_BYTES
    assert any(f"band ({Band.CONTEXT})" in line for line in plan.assumptions)


def test_the_kernel_that_was_asked_for_is_planned():
    made = config(2, model={"sdpa_backend": "cudnn"})
    names = {item.name for item in record(made).trace.operations if "attention" in item.name}
    assert names == {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"}


def test_float32_takes_the_efficient_kernel():
    made = config(2, model={"torch_dtype_str": "float32"})
    names = {item.name for item in record(made).trace.operations if "attention" in item.name}
    assert "_scaled_dot_product_efficient_attention" in names
    assert not any("flash" in name for name in names)


def test_the_cpu_is_planned_too():
    assert rehearse(config(2, card={"name": "cpu"}, model={"model_max_length": 64})).batch.context == 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({**GEMMA2, "max_position_embeddings": 4096}, r"Gemma2Attention changes its scores \(softcap\)"),
        ({**SHAPE, "model_type": "mistral", "sliding_window": 512}, "MistralAttention sees 512 tokens back"),
        ({**SHAPE, "attention_dropout": 0.1}, "LlamaAttention drops out 0.1 of its scores"),
    ],
)
def test_what_attention_over_devices_does_not_do_is_refused_by_the_plan(shape, message):
    with pytest.raises(RequestError, match=message):
        rehearse(config(2, shape=shape))

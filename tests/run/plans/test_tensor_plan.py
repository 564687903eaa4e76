"""Plans with tensor parallelism: a part of the weights and activations per device, and sums that are waited for."""

from typing import Any

import pytest

from framework.errors import RequestError
from framework.memory.bands import Band
from framework.memory.planning import NCCL_BYTES
from framework.memory.trace import EXCHANGE
from framework.run.rehearsal.rehearse import record, rehearse
from framework.schema.config import TrainingConfig
from tests.tiny import LLAMA, tiny_config

CARD = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "link_bytes_per_second": 4.5e11}
RATES = {"bandwidth_bytes_per_second": 3.35e12, "fp32_flops": 6.7e13, "bf16_flops": 9.9e14, "fp16_flops": 9.9e14}
SHAPE = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 64}
TOKENS, LAYERS, WIDTH = 128, 3, 256
MATRICES = LAYERS * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 1024)
"""Number of elements of the split tensors."""


def config(
    size: int, groups: int = 1, card: dict[str, Any] = CARD, shape: dict[str, Any] = SHAPE, **sections: Any
) -> TrainingConfig:
    """One row a step in each group."""
    training = {"per_device_train_batch_size": 1, "global_batch_size": groups, "optimizer": "adamw_torch_fused"}
    training |= {"mixed_precision_dtype": "none", **sections.pop("training", {})}
    fsdp = {"tensor_parallel_size": size, **sections.pop("fsdp", {})}
    model = {"model_max_length": TOKENS, "torch_dtype_str": "bfloat16", **sections.pop("model", {})}
    gpu = {**card, "count": size * groups}
    return tiny_config(shape, gpu=gpu, fsdp=fsdp, model=model, training=training, **sections)


def test_a_device_has_its_part_of_matrices_and_states():
    alone, shared = rehearse(config(1)), rehearse(config(2))
    for term, held in (("weights", 2), ("optimizer", 4)):
        one, other = (getattr(made.step_peak.terms, term) for made in (alone, shared))
        assert one - other == pytest.approx(MATRICES * held / 2, rel=0.01)
    assert (shared.batch.tensor, shared.batch.world) == (2, 1)
    assert (shared.total_parameters, shared.trainable_parameters) == (alone.total_parameters, alone.total_parameters)
    assert shared.checkpoint_bytes == pytest.approx(alone.checkpoint_bytes, rel=1e-5)  # a step count a matrix


def test_what_blocks_keep_between_the_matrices_shrinks_and_what_goes_into_them_does_not():
    kept = []
    for size in (1, 2):
        phases = {phase.name: phase.terms.activations for phase in rehearse(config(size)).phases}
        kept.append(phases["loss"])
    inner = LAYERS * TOKENS * 1024 * 2 * 3  # gate, its activation times up, and up, bfloat16
    assert inner / 2 < kept[0] - kept[1] < kept[0] / 2


@pytest.mark.parametrize(("checkpoints", "again"), [(False, 0), (True, 1)])
def test_each_block_adds_up_twice_in_each_pass(checkpoints, again):
    """A checkpoint repeats the first sum: nothing is kept of what comes after the second."""
    made = config(2, training={"enable_gradient_checkpointing": checkpoints}, data={"eval_fraction": 0.0})
    trace = record(made).trace
    exchanged = [item for item in trace.operations if item.name == EXCHANGE and item.bytes > 1024]
    steps = sum(mark.phase == "optimizer_step" for mark in trace.marks)
    assert len(exchanged) == steps * LAYERS * (4 + again)
    assert {item.bytes for item in exchanged} == {2 * TOKENS * WIDTH * 2}


@pytest.mark.parametrize("fsdp", [{}, {"enable_fsdp": True}])
def test_groups_have_copies_or_shards_of_the_parts(fsdp):
    parts, grouped = rehearse(config(2)), rehearse(config(2, groups=2, fsdp=fsdp))
    share = 2 if fsdp else 1
    assert grouped.step_peak.terms.weights == pytest.approx(parts.step_peak.terms.weights / share, rel=0.02)
    assert grouped.batch.world == 2
    assert grouped.checkpoint_bytes == pytest.approx(parts.checkpoint_bytes, rel=1e-4)
    overheads = [made.step_peak.terms.overhead for made in (parts, grouped)]
    assert overheads == [NCCL_BYTES, 3 * NCCL_BYTES]


def test_an_adapter_is_cut_along():
    training, peft = {"use_peft": True}, {"lora_target_modules": ["all-linear"]}
    alone, shared = (rehearse(config(size, training=training, peft=peft)) for size in (1, 2))
    assert shared.trainable_parameters == alone.trainable_parameters
    assert shared.checkpoint_bytes == pytest.approx(alone.checkpoint_bytes, rel=1e-4)
    assert alone.step_peak.terms.optimizer / 2 < shared.step_peak.terms.optimizer < alone.step_peak.terms.optimizer


def test_time_has_the_sums_and_speed_is_of_one_device():
    plan = rehearse(config(2, card={**CARD, **RATES}))
    assert plan.step is not None
    assert plan.step.tokens_per_second == pytest.approx(TOKENS / 2 / plan.step.seconds)
    slow = rehearse(config(2, card={**CARD, **RATES, "link_bytes_per_second": 1e7}))
    assert slow.step is not None
    assert slow.step.seconds > 2 * plan.step.seconds
    assert slow.step.bound_by == "communication"


def test_the_plan_says_what_is_shared_and_what_cards_took():
    plan = rehearse(config(2, card={"name": "cpu"}))
    message = "21 tensors are in 2 parts, one on each device of a group; embedding and head are replicated"
    assert message in plan.assumptions
    plan = rehearse(config(2))
    assert any(f"band ({Band.TENSOR})" in line for line in plan.assumptions)
    assert any("steps of two H200 were planned within 10 %" in line for line in plan.assumptions)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({**SHAPE, "num_key_value_heads": 1}, "1 key and value heads of llama are not 2 equal parts"),
        ({**SHAPE, "intermediate_size": 1023}, "1,023 inner features of llama are not 2 equal parts"),
        (
            {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64},
            "no tensor-parallel plan for gpt2",
        ),
        ({**SHAPE, "model_type": "olmo2"}, "plan for olmo2 has colwise_gather_output, rowwise_split_input, which is"),
        ({**SHAPE, "model_type": "cohere", "use_qk_norm": True}, r"does not mention .*self_attn\.q_norm\.weight"),
    ],
)
def test_models_that_cannot_be_cut_so_are_refused_with_what_can(shape, message):
    with pytest.raises(RequestError, match=message) as caught:
        rehearse(config(2, shape=shape))
    assert "1" in (caught.value.problems[0].expected or "")

"""Cases that plans must get right, with numbers."""

from typing import Any

import pytest

from framework.memory.cards import card_of_size, read_card, smallest
from framework.memory.host_use import HOST_BASE_BYTES, WORKER_BYTES
from framework.memory.ledger import Plan
from framework.memory.planning import NCCL_BYTES, make_plan
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from tests.tiny import LLAMA, tiny_config

GIB = 1 << 30
H100 = read_card("h100_80gb")
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
TINYLLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
PURE_BF16 = {"torch_dtype_str": "bfloat16"}


def plan(architecture: dict[str, Any], length: int, **sections: dict[str, Any]) -> Plan:
    model = {"architecture": architecture, "load_pretrained_weights": False, "model_max_length": length}
    model |= {"chunked_loss": False}
    model |= sections.pop("model", {})
    training = {"per_device_train_batch_size": 1, "optimizer": "adamw_torch_fused", **sections.pop("training", {})}
    config = TrainingConfig(model=model, training=training, gpu=sections.pop("gpu", H100), **sections)
    return make_plan(record(config))


def layers(architecture: dict[str, Any], count: int) -> dict[str, Any]:
    return {**architecture, "num_hidden_layers": count}


@pytest.mark.parametrize("count", [1, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "each"), [({"torch_dtype_str": "float32"}, 16), (PURE_BF16, 8)])
def test_full_training_with_adam_costs_16_or_8_bytes_a_parameter(model: dict[str, Any], each: int, count: int) -> None:
    """70.55e9 parameters are 1051 GiB with float32 weights and 526 GiB in pure bfloat16, before activations."""
    gc = {"enable_gradient_checkpointing": True, "mixed_precision_dtype": "bf16" if each == 16 else "none"}
    made = plan(layers(LLAMA_70B, count), 16, model={**model, "chunked_loss": True}, training=gc)
    terms = next(phase.terms for phase in made.phases if phase.name == "optimizer_step")
    held = terms.weights + terms.gradients + terms.optimizer
    assert held == pytest.approx(each * made.total_parameters, rel=0.01)
    if count == 80:
        assert held / GIB == pytest.approx(1051 if each == 16 else 526, rel=0.01)
        assert not made.fits


def test_chunks_save_the_logits_and_are_the_first_advice_when_these_are_the_largest_term() -> None:
    """Whole logits of V words at backward: 4 bytes each of log softmax, and of the two gradients around it."""
    wide = {**layers(LLAMA, 2), "hidden_size": 128, "vocab_size": 131072, "max_position_embeddings": 4096}
    whole, chunked = (plan(wide, 4096, model={**PURE_BF16, "chunked_loss": loss}) for loss in (False, True))
    saved = whole.step_peak.allocated_bytes - chunked.step_peak.allocated_bytes
    assert whole.peak.terms.logits_and_loss == pytest.approx(12 * 4096 * 131072, rel=0.01)
    figures = [float(word) for word in whole.warnings[0].split() if word.replace(".", "").isdigit()]
    assert "model.chunked_loss=true" in whole.warnings[0]
    assert figures == [pytest.approx(saved / GIB, rel=0.25)]
    assert chunked.warnings == ()


@pytest.mark.parametrize("count", [2, pytest.param(22, marks=pytest.mark.slow)])
def test_lora_keeps_no_fewer_activations_than_full_training(count: int) -> None:
    """At 2 x 8192 tokens adapters save gradients and states, and add activations."""
    rows = {"per_device_train_batch_size": 2}
    full = plan(layers(TINYLLAMA, count), 8192, model=PURE_BF16, training=rows)
    lora = plan(
        layers(TINYLLAMA, count),
        8192,
        model=PURE_BF16,
        training={**rows, "use_peft": True},
        peft={"lora_target_modules": ["all-linear"], "lora_dropout": 0.05},
    )
    backward = [next(phase.terms for phase in made.phases if phase.name == "loss") for made in (full, lora)]
    assert backward[1].activations >= backward[0].activations
    if count == 22:
        gone = next(made.total_parameters * 2 * 3 for made in (full,))
        assert gone / GIB == pytest.approx(6.1, rel=0.02)


def test_evaluation_keeps_the_logits_of_one_batch_only() -> None:
    """Eval is a phase; its size does not depend on how many rows are evaluated."""
    base = {"eval_fraction": 0.1}
    small, large = (
        plan({**LLAMA, "vocab_size": 32000}, 128, training={"per_device_eval_batch_size": rows}, data=base)
        for rows in (8, 16)
    )
    found = [next(phase.terms for phase in made.phases if phase.name == "eval") for made in (small, large)]
    assert found[1].logits_and_loss == pytest.approx(2 * found[0].logits_and_loss, rel=0.01)
    assert 2 * 4 * 8 * 128 * 32000 <= found[0].logits_and_loss <= 3 * 4 * 8 * 128 * 32000


def test_a_checkpoint_of_8_billion_parameters() -> None:
    """Float32 weights and Adam 12 bytes a parameter, times retention plus one, and the export in bfloat16."""
    training = {"save_steps": 100, "max_steps": 2000, "save_total_limit": 2, "mixed_precision_dtype": "bf16"}
    made = plan(
        {**layers(LLAMA_70B, 1), "dtype": "bfloat16"}, 16, training=training, model={"torch_dtype_str": "float32"}
    )
    assert made.checkpoint_bytes == pytest.approx(12 * made.total_parameters, rel=0.001)
    assert made.disk_bytes == pytest.approx((3 * 12 + 2) * made.total_parameters, rel=0.001)
    assert pytest.approx(89.7, rel=0.01) == 12 * 8.03e9 / GIB


def test_loading_streams_so_the_host_holds_no_second_model() -> None:
    """Each rank needs a tensor at a time on the host; what counts is the largest file it writes."""
    made = plan(layers(LLAMA_70B, 1), 16, model=PURE_BF16, training={"use_peft": True})
    largest = 2 * 128256 * 8192
    assert made.host_bytes == HOST_BASE_BYTES + largest


def test_a_plan_for_the_cpu_counts_resident_bytes_and_says_so() -> None:
    made = make_plan(record(tiny_config(gpu=read_card("cpu"))))
    message = "cpu: bytes are those of tensors in the process's resident memory"
    assert any(line.startswith(message) for line in made.assumptions)
    assert made.fits
    assert made.step is None
    assert made.run_hours is None
    assert made.host_bytes == HOST_BASE_BYTES + made.peak.reserved_bytes
    workers = make_plan(record(tiny_config(gpu=read_card("cpu"), data={"workers": 3})))
    assert workers.host_bytes == made.host_bytes + 3 * WORKER_BYTES


def test_the_batch_and_the_length_are_reported() -> None:
    made = plan(LLAMA, 64, training={"per_device_train_batch_size": 4, "max_steps": 100})
    assert any("64 tokens long, 4 rows" in assumption for assumption in made.assumptions)
    assert made.step is not None
    assert made.run_hours == pytest.approx(made.step.seconds * 100 / 3600)


def test_a_tiny_plan_in_fixed_numbers() -> None:
    """Golden values: a change here is a change of what is recorded, replayed or counted, and must be intended."""
    made = plan(LLAMA, 64, model=PURE_BF16, training={"per_device_train_batch_size": 4})
    assert (made.total_parameters, made.trainable_parameters) == GOLDEN_PARAMETERS
    assert {phase.name: phase.allocated_bytes for phase in made.phases} == GOLDEN_PHASES
    assert made.step_peak.reserved_bytes == GOLDEN_RESERVED


@pytest.mark.parametrize(
    ("sections", "left_out"),
    [
        ({"training": {"ema_decay": 0.9, "ema_device": "host"}}, "the host updates the average"),
    ],
)
def test_what_a_plan_leaves_out_it_says(sections: dict[str, Any], left_out: str) -> None:
    assert any(left_out in line for line in plan(LLAMA, 64, **sections).assumptions)
    assert not any(left_out in line for line in plan(LLAMA, 64).assumptions)


GOLDEN_PARAMETERS = (26784, 26784)
GOLDEN_PHASES = {
    "load": 56832,
    "forward": 68066304,
    "loss": 68329984,
    "backward": 68393472,
    "optimizer_step": 67364352,
    "save": 67288576,
    "resume": 179200,
}
GOLDEN_RESERVED = 69206016


def test_a_mixed_list_of_cards_is_planned_for_the_smallest() -> None:
    """The plan is one device's share, and says that nothing runs on several devices yet."""
    mixed = smallest([card_of_size("40gb"), card_of_size("40gb"), card_of_size("80gb")])
    made = plan(LLAMA, 64, gpu=mixed, training={"per_device_train_batch_size": 4, "global_batch_size": 24})
    alone = plan(
        LLAMA, 64, gpu=card_of_size("40gb"), training={"per_device_train_batch_size": 4, "global_batch_size": 8}
    )
    assert made.device.usable_bytes == alone.device.usable_bytes
    assert made.batch.accumulation == alone.batch.accumulation == 2
    assert made.peak.device_bytes == alone.peak.device_bytes + NCCL_BYTES
    assert any(
        "equal shares on 3 devices" in assumption and "40gb is the limit" in assumption
        for assumption in made.assumptions
    )


def test_a_moving_average_costs_4_bytes_a_weight_on_the_device_or_on_the_host_with_a_copy_a_step() -> None:
    shape, text = layers(TINYLLAMA, 2), {"train": [{"path": "python_stdlib"}], "eval_fraction": 0.1}
    plain, near, away = (
        plan(shape, 64, training=asked, model=PURE_BF16, data=text)
        for asked in ({}, {"ema_decay": 0.9}, {"ema_decay": 0.9, "ema_device": "host"})
    )
    average = pytest.approx(4 * plain.trainable_parameters, rel=0.02)
    assert near.peak.terms.optimizer - plain.peak.terms.optimizer == average
    assert away.peak.terms.optimizer == plain.peak.terms.optimizer
    assert away.host_bytes - (plain.host_bytes - plain.host.end_bytes) == average
    assert near.disk_bytes - plain.disk_bytes == 4 * plain.trainable_parameters, "in the checkpoint"
    evals = [next(phase.allocated_bytes for phase in made.phases if phase.name == "eval") for made in (plain, near)]
    assert evals[1] - evals[0] == pytest.approx(6 * plain.trainable_parameters, rel=0.02), "and the weights meanwhile"
    assert plain.step is not None
    assert away.step is not None
    assert away.step.seconds > plain.step.seconds, "by the copies, as far as nothing runs next to them"


def test_states_on_the_host_cost_two_copies_over_the_link_a_step() -> None:
    """The 1B on an H200: 0.35 s a step instead of 0.17 (benchmarks/results/levers_h200.json)."""
    shape = layers(TINYLLAMA, 2)
    plain, away = (plan(shape, 64, training={"optimizer_offload": where}) for where in ("none", "host"))
    assert plain.step is not None
    assert away.step is not None
    copies = 2 * 8 * plain.trainable_parameters / (H100["host_link_bytes_per_second"] * 5.5 / 6.3)
    assert copies < away.step.seconds - plain.step.seconds < 1.3 * copies, "and an update for each weight alone"
    assert away.step.bound_by == "communication"


@pytest.mark.slow
@pytest.mark.parametrize(("share", "longer"), [(0.3, 1.0), (0.9, 1.15), (4.0, 4.0)])
def test_each_pass_waits_for_the_blocks_that_come_from_the_host(share: float, longer: float) -> None:
    """Copies that take 0.9 of a step's computing are half in its shorter forward pass, which waits for them."""
    training = {"use_peft": True, "per_device_train_batch_size": 4, "enable_gradient_checkpointing": True}
    shape = layers(TINYLLAMA, 8)
    plain = plan(shape, 2048, training=training, model=PURE_BF16)
    assert plain.step is not None
    blocks = 2 * (8 - 2) * 44_044_288  # bf16; both passes find two of the eight where they were
    link = 2 * blocks / (share * plain.step.seconds) / (5.5 / 6.3)
    card = {**H100, "host_link_bytes_per_second": link}
    away = plan(shape, 2048, training=training, model={**PURE_BF16, "offload_frozen_base": True}, gpu=card)
    assert away.step is not None
    assert away.step.seconds / plain.step.seconds == pytest.approx(longer, rel=0.05)
    assert (away.step.bound_by == "communication") == (share > 0.5)


def test_what_the_step_time_leaves_out_is_reported() -> None:
    made = plan(
        LLAMA, 64, training={"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": "save_attention"}
    )
    assert any("policy" in line and "step time" in line for line in made.assumptions)
    packed = {"q_lora": True, "q_lora_bits": 8}
    made = plan(LLAMA, 64, training={"use_peft": True}, peft=packed)
    assert any("LLM.int8" in line and "step time" in line for line in made.assumptions)


def test_copies_on_several_devices_keep_their_gradients_and_exchange_them() -> None:
    """DDP holds all gradients in buckets from the start on; one device has them from backward to the update."""
    shape = layers(TINYLLAMA, 2)
    alone, together = (plan(shape, 512, gpu={**H100, "count": count}) for count in (1, 4))
    gradients = 4 * alone.trainable_parameters
    forward = [next(phase for phase in made.phases if phase.name == "forward") for made in (alone, together)]
    assert forward[1].allocated_bytes - forward[0].allocated_bytes == pytest.approx(gradients, rel=0.01)
    assert together.step is not None
    assert alone.step is not None
    assert together.step.seconds > alone.step.seconds
    assert any("DDP" in assumption for assumption in together.assumptions)

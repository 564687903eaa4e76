"""Number formats and kernels in a rehearsal: the bytes they move, and where."""

from typing import Any

import pytest

from framework.errors import RequestError
from framework.memory.cards import read_card
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.rehearsal.rehearse import record
from framework.schema.gpu import GPUParams
from tests.grids import first, thinned
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

WIDE: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
T4 = GPUParams.model_validate(read_card("t4_16gb"))


def plan(card: GPUParams = H100, **sections: Any) -> Plan:
    return make_plan(record(tiny_config(WIDE, gpu=card, **sections)))


def test_float16_autocast_costs_what_bfloat16_does() -> None:
    """The scaler in addition: a scale, a count of steps and a flag, each in a block of 512 bytes."""
    bf16, fp16 = (plan(training={"mixed_precision_dtype": word}) for word in ("bf16", "fp16"))
    assert 0 < fp16.peak.allocated_bytes - bf16.peak.allocated_bytes <= 8 * 512
    assert fp16.peak.terms.unattributed == 0
    assert fp16.peak.terms.autocast_copies == bf16.peak.terms.autocast_copies > 0


@pytest.mark.parametrize("adapted", [False, True])
def test_a_card_without_bfloat16_is_planned_in_float16(adapted: bool) -> None:
    made = plan(T4, training={"use_peft": adapted}, peft={"lora_target_modules": ["q_proj"]})
    assert made.peak.terms.autocast_copies > 0
    assert made.step is not None


def ran_as(made: Plan) -> list[str]:
    return [line.removeprefix("attention runs as ") for line in made.assumptions if line.startswith("attention runs")]


@pytest.mark.parametrize(("checkpointed", "backend"), thinned([False, True], ["cudnn", "flash", "math"]))
def test_the_plan_follows_the_chosen_kernel(backend: str, checkpointed: bool) -> None:
    training = {"enable_gradient_checkpointing": checkpointed, "mixed_precision_dtype": "bf16"}
    made = plan(model={"sdpa_backend": backend}, training=training)
    assert ran_as(made) == ["math" if backend == "math" else f"scaled_dot_product_{backend}_attention"]


def test_math_keeps_scores_that_no_other_kernel_does() -> None:
    math, flash = (plan(model={"sdpa_backend": word}).step_peak.terms.activations for word in ("math", "flash"))
    rows, heads, tokens, layers = 8, 4, 128, 2
    assert math - flash > layers * rows * heads * tokens**2 * 4  # at least the float32 weights of every head


@pytest.mark.parametrize("card", [H100, T4], ids=lambda card: card.name)
def test_a_kernel_that_cannot_serve_the_model_is_refused_with_one_that_can(card: GPUParams) -> None:
    """Grouped queries are nothing for the efficient kernel, on any card."""
    with pytest.raises(
        RequestError, match=r"model\.sdpa_backend: efficient cannot serve.*4 heads over 2 keys"
    ) as caught:
        plan(card, model={"sdpa_backend": "efficient"})
    assert caught.value.problems[0].expected == f"{'cudnn' if card is H100 else 'math'}, or leave it unset"


@pytest.mark.parametrize(
    "kernel", first(2, ["flash_attention_2", "flex_attention", "flash_attention_3", "flash_attention_4"])
)
def test_kernels_of_other_packages_are_planned_without_them(kernel: str) -> None:
    made, flash = plan(model={"attn_implementation": kernel}), plan(model={"sdpa_backend": "flash"})
    assert made.step_peak.allocated_bytes == flash.step_peak.allocated_bytes
    assert any(kernel in line for line in made.assumptions)


def test_tf32_costs_time_and_no_memory() -> None:
    wide = {**WIDE, "hidden_size": 4096, "intermediate_size": 8192}  # bound by arithmetic
    plain, rounded = (
        make_plan(record(tiny_config(wide, gpu=H100, training={"tf32": tf32, "mixed_precision_dtype": "none"})))
        for tf32 in (False, True)
    )
    assert plain.peak == rounded.peak
    assert plain.step is not None
    assert rounded.step is not None
    assert rounded.step.seconds < 0.8 * plain.step.seconds


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": {"use_peft": True}, "peft": {"peft_method": "pissa"}}, 98 << 20),
        ({"training": {"use_peft": True}, "peft": {"peft_method": "lora"}}, 0),
        ({"training": {"optimizer": "galore_adamw"}}, 98 << 20),
        ({"training": {"optimizer": "apollo_adamw"}}, 0),
    ],
    ids=["pissa", "lora", "galore", "apollo"],
)
def test_decompositions_on_the_card_take_their_library_next_to_the_allocator(sections: Any, expected: int) -> None:
    assert plan(**sections).peak.terms.overhead - H100.context_bytes == expected

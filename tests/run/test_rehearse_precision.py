"""Number formats and kernels in a rehearsal: the bytes they move, and where."""

from typing import Any

import pytest

from framework.memory.cards import read_card
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.rehearse import record
from framework.schema.gpu import GPUParams
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

WIDE: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
T4 = GPUParams.model_validate(read_card("t4_16gb"))


def plan(card: GPUParams = H100, **sections: Any) -> Plan:
    return make_plan(record(tiny_config(WIDE, gpu=card, **sections)))


def test_float16_autocast_costs_what_bfloat16_does() -> None:
    """And the scaler: a scale, a count of steps and a flag, of one block of 512 bytes each."""
    bf16, fp16 = (plan(training={"mixed_precision_dtype": word}) for word in ("bf16", "fp16"))
    assert 0 < fp16.peak.allocated_bytes - bf16.peak.allocated_bytes <= 8 * 512
    assert fp16.peak.terms.unattributed == 0
    assert fp16.peak.terms.autocast_copies == bf16.peak.terms.autocast_copies > 0


@pytest.mark.parametrize("adapted", [False, True])
def test_a_card_without_bfloat16_is_planned_in_float16(adapted: bool) -> None:
    made = plan(T4, training={"use_peft": adapted}, peft={"lora_target_modules": ["q_proj"]})
    assert made.peak.terms.autocast_copies > 0
    assert made.step is not None

"""`peft.lora_init: eva` in a plan: its passes over rows are a phase before the first step."""

from typing import Any

import pytest

from framework.errors import RequestError
from framework.memory.cards import read_card
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.components import MOST_BATCHES
from framework.run.planning.model_checks import inspect
from framework.run.rehearsal.rehearse import record
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

TOKENS = 64
WIDE = {**LLAMA, "intermediate_size": 4096}


def plan(rows: int, start: str = "eva", card: Any = H100, **peft: Any) -> Plan:
    made = tiny_config(
        WIDE,
        gpu=card,
        model={"model_max_length": TOKENS, "chunked_loss": 64},
        training={
            **{"use_peft": True, "per_device_train_batch_size": rows, "global_batch_size": rows},
            **{"optimizer": "adamw_torch_fused", "enable_gradient_checkpointing": True},
        },
        peft={"lora_init": start, "lora_r": 4, "lora_target_modules": ["down_proj"], **peft},
    )
    return make_plan(record(made))


def start_of(made: Plan) -> int:
    (held,) = (phase.terms.weights for phase in made.phases if phase.name == "start")
    (found,) = (phase.allocated_bytes for phase in made.phases if phase.name == "start")
    return found - held


def test_the_start_is_a_phase_with_copies_of_one_input_in_float64() -> None:
    """What more rows add: the input in float32, that of its tokens, a copy of these, and one in float64; next to it the
    hidden states of the embedding, the layer and its norm, and all micro-batches. On the CPU sums have no buffers."""
    few, many = (plan(rows, card=read_card("cpu")) for rows in (64, 128))
    assert [phase.name for phase in many.phases][:3] == ["load", "start", "forward"]
    tokens = 64 * TOKENS
    inputs, hidden = 4 * tokens * WIDE["intermediate_size"], 4 * tokens * WIDE["hidden_size"]
    batches = MOST_BATCHES * tokens * 2 * 8
    assert start_of(many) - start_of(few) == pytest.approx(5 * inputs + 4 * hidden + batches, rel=0.005)


def test_only_the_start_differs_and_the_verdict_counts_it() -> None:
    with_rows, drawn = plan(256), plan(256, "gaussian")
    assert with_rows.step_peak.allocated_bytes == drawn.step_peak.allocated_bytes
    assert with_rows.step is not None
    assert drawn.step is not None
    assert with_rows.step.seconds == pytest.approx(drawn.step.seconds, rel=1e-6)
    assert {phase.name for phase in with_rows.phases} - {phase.name for phase in drawn.phases} == {"start"}
    assert not any("not planned" in line for line in with_rows.assumptions)
    assert with_rows.peak.terms.unattributed == 0
    (start,) = (phase for phase in with_rows.phases if phase.name == "start")
    assert start.allocated_bytes > drawn.step_peak.allocated_bytes
    assert with_rows.peak.phase == "start"
    assert with_rows.peak.device_bytes_upper > start.allocated_bytes


def test_a_continued_adapter_has_no_start_from_rows() -> None:
    made = tiny_config(WIDE, training={"use_peft": True}, peft={"lora_init": "eva"})
    assert made.starts_from_rows
    continued = type(made).model_validate({**made.model_dump(), "peft": {"lora_init": "eva", "adapter_path": "/a"}})
    assert not continued.starts_from_rows


def test_check_and_plan_refuse_a_rank_above_every_width_as_training_does() -> None:
    made = tiny_config(WIDE, training={"use_peft": True}, peft={"lora_init": "eva", "lora_r": 5000})
    (problem,) = inspect(made).problems
    with pytest.raises(RequestError) as raised:
        record(made)
    assert raised.value.problems == (problem,)
    assert str(problem).startswith("peft.lora_init: the rank is above the width of each adapted module's input")
    narrow = WIDE["hidden_size"]
    assert f"(at most {narrow})" in str(problem), "q_proj and v_proj"


def test_check_and_plan_name_the_adapters_that_are_drawn_all_the_same() -> None:
    targets = ["q_proj", "down_proj", "embed_tokens"]
    peft = {"lora_init": "eva", "lora_r": 100, "lora_target_modules": targets}
    made = tiny_config(WIDE, training={"use_peft": True}, peft=peft)
    (warning,) = [text for text in record(made).warnings if "kaiming" in text]
    assert warning.startswith("peft.lora_init: 3 of 5 adapters are drawn as kaiming (embeddings, ")
    assert warning.endswith(": model.embed_tokens, model.layers.0.self_attn.q_proj, model.layers.1.self_attn.q_proj")
    assert warning in map(str, inspect(made).warnings)


def test_only_linear_layers_start_from_rows() -> None:
    peft = {"lora_init": "eva", "lora_target_modules": ["embed_tokens"]}
    with pytest.raises(RequestError, match="eva computes the A matrices of linear layers, and none has an adapter"):
        record(tiny_config(WIDE, training={"use_peft": True}, peft=peft))

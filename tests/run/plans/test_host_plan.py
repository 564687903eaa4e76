"""Host memory of all ranks of a machine in the plan: while the model loads, and the pinned part."""

from functools import cache
from typing import Any

import pytest

from framework.memory.cards import read_card
from framework.memory.host_use import HOST_BASE_BYTES
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.reports.plan_text import facts
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig

GB = 10**9
WIDE: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 12},
    **{"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 32000, "dtype": "float32"},
}
"""40 billion weights in few layers, which are quick to rehearse."""
FEW = {**WIDE, "num_hidden_layers": 3}
"""If no total is known in figures."""
EXPERTS = {**WIDE, "model_type": "mixtral", "num_hidden_layers": 2, "intermediate_size": 46592}
EXPERTS |= {"num_local_experts": 8, "num_experts_per_tok": 2}
DORA = {"training": {"use_peft": True}, "peft": {"peft_method": "dora", "lora_target_modules": ["q_proj"]}}


@cache
def planned(name: str, count: int = 8) -> Plan:
    architecture, sections = {
        "mapped": (WIDE, {}),
        "converted": ({**FEW, "dtype": "bfloat16"}, {}),
        "sent": (EXPERTS, {}),
        "whole": (WIDE, DORA),
        "offloaded": (FEW, {"fsdp": {"cpu_offload": True}}),
        "gathered": (FEW, {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}}),
    }[name]
    made: dict[str, Any] = dict(sections)
    training = {"per_device_train_batch_size": 1, "global_batch_size": count, "mixed_precision_dtype": "none"}
    config = {
        "training": {**training, **made.get("training", {})},
        "model": {
            **{"model_name": "made/up", "architecture": architecture, "load_pretrained_weights": True},
            **{"torch_dtype_str": "float32", "model_max_length": 64},
        },
        "peft": made.get("peft", {}),
        "fsdp": {"enable_fsdp": True, **made.get("fsdp", {})},
        "gpu": {**read_card("h200_141gb"), "count": count},
    }
    return make_plan(record(TrainingConfig.model_validate(config)))


@pytest.mark.slow
def test_o11_a_model_that_every_rank_loads_takes_eight_times_its_size() -> None:
    """160 GB of float32 weights on 8 ranks."""
    whole, sent, mapped = planned("whole"), planned("sent"), planned("mapped")
    assert 4 * whole.total_parameters == pytest.approx(160 * GB, rel=0.05)
    assert whole.host.load_bytes == pytest.approx(1280 * GB, rel=0.05)
    assert 4 * sent.total_parameters == pytest.approx(160 * GB, rel=0.05)
    assert sent.host.load_bytes == pytest.approx(160 * GB, rel=0.05)
    assert mapped.host.load_bytes == 0, "pages of a file are the system's to take back"


def test_the_first_rank_alone_holds_what_it_sends() -> None:
    sent = planned("sent")
    assert sent.host_bytes - HOST_BASE_BYTES == pytest.approx(160 * GB, rel=0.05)
    parts = 3 * 4 * sent.total_parameters / 8
    assert sent.host.other_bytes - HOST_BASE_BYTES == pytest.approx(parts, rel=0.05), "weights and states, to be saved"
    assert sent.host_bytes_of(8) == sent.host_bytes + 7 * sent.host.other_bytes


def test_every_rank_converts_the_largest_tensor_on_its_host() -> None:
    assert planned("converted").host.load_bytes == 8 * 4 * 16384 * 53248


def test_f05_what_is_pinned_is_planned_for_all_ranks() -> None:
    """Weights and gradients of a rank's part, in blocks of powers of two."""
    plan = planned("offloaded")
    part = 4 * plan.total_parameters / 8
    assert 2 * part <= plan.host.pinned_bytes < 4 * part
    assert planned("gathered").host.pinned_bytes == 0
    host = dict(facts(plan))["host memory"]
    assert "for the 8 processes of a machine" in host
    assert f"{8 * plan.host.pinned_bytes / 2**30:,.2f} GiB of it pinned" in host


def test_a_checkpoint_that_is_gathered_is_on_the_first_host() -> None:
    """Weights and both states of AdamW."""
    plan = planned("gathered")
    assert plan.host_bytes - HOST_BASE_BYTES == pytest.approx(3 * 4 * plan.total_parameters, rel=0.01)
    assert plan.host.other_bytes < plan.host_bytes / 10


@pytest.mark.slow
def test_a_machine_is_taken_to_have_eight_cards() -> None:
    plan = planned("mapped", 16)
    assert plan.host.processes == 8
    assert Plan.from_json(plan.to_json()) == plan

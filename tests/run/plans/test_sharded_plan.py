"""The plan of a sharded run against two cards that ran it, and what each strategy changes in it.

Rows were measured on two H200, by the product's step (tests/calibration/h200_sharded_step.json; four constants of step
time are fitted to an earlier measurement of thirteen of them) and by those of five older steps (h200_fsdp2_step.json;
nothing is fitted to those).
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.sharded_rows import ROWS as SHARDED_ROWS
from benchmarks.sharded_rows import step_config
from framework import load
from framework.memory import host_use
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.memory.step_time import step_time, with_update_on_host
from framework.memory.trace import GATHER, REDUCE, Rehearsal
from framework.run.rehearsal.rehearse import record, rehearse
from framework.schema.config import TrainingConfig
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

OWN, PROTOTYPE = (
    json.loads((Path(__file__).parents[2] / "calibration" / f"h200_{name}_step.json").read_text())["rows"]
    for name in ("sharded", "fsdp2")
)
SHAPES = {row["name"]: row for row in SHARDED_ROWS}
QUICK = ("1b",)
LOOSE = {"qwen3-1.7b-gc": 0.085, "l1b-bf16-gc": 0.06}
"""Rows whose reserved bytes are further off than 5 %."""
SLOW = {"8b-gc-chunked": 0.22, "8b-qlora-gc": 0.26, "8b-qlora-gc-zero2": 0.2, "1b-offload": 0.18}
"""Rows whose step took so much longer than planned. With the code before, on another machine of the kind, the first
took 0.41 s and not 0.49, the last 1.21 s and not 1.32; unpacking 4 bits next to the gathers is not calibrated."""
CARD = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "link_bytes_per_second": 4.5e11}


def measured_config(row: dict) -> TrainingConfig:
    dtype = row.get("dtype", "float32")
    lora = ["peft=lora", "peft.lora_r=16", "peft.lora_alpha=32", "peft.adapter_dtype=bfloat16"]
    changes = [f"model={row['model']}", "gpu=h200_141gb", "gpu.count=2", "fsdp.enable_fsdp=true"]
    changes += [f"fsdp.sharding_strategy={row.get('strategy', 'FULL_SHARD')}", f"model.torch_dtype_str={dtype}"]
    changes += [f"training.mixed_precision_dtype={'bf16' if dtype == 'float32' else 'none'}"]
    changes += [f"training.enable_gradient_checkpointing={str(row['gc']).lower()}", "model.chunked_loss=false"]
    changes += [
        f"training.per_device_train_batch_size={row['micro']}",
        f"training.global_batch_size={2 * row['micro']}",
    ]
    changes += ["model.model_max_length=2048", "training.optimizer=adamw_torch_fused", "training.learning_rate=1e-4"]
    changes += ["data.eval_fraction=0", *(lora if row.get("lora") else ["training.use_peft=false"])]
    return load("finetune_local", overrides=changes)


def parameters(rows):
    return [pytest.param(row, marks=[] if row["name"] in QUICK else pytest.mark.slow, id=row["name"]) for row in rows]


@pytest.mark.parametrize("row", parameters([*OWN, *PROTOTYPE]))
def test_a_plan_is_what_two_cards_took(row):
    is_own = row["name"] in SHAPES
    made = rehearse(step_config(SHAPES[row["name"]], 2, "h200_141gb") if is_own else measured_config(row))
    peak, held = made.step_peak, row["reserved_bytes"] + row.get("beside_torch", 0)
    assert peak.allocated_bytes == pytest.approx(
        row["allocated_bytes"], rel=0.001 if "qlora" in row["name"] else 0.0005
    )
    assert peak.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=LOOSE.get(row["name"], 0.05))
    assert peak.device_bytes_upper >= held
    assert made.step is not None
    assert made.step.seconds == pytest.approx(row["step_seconds"], rel=SLOW.get(row["name"], 0.15))


@cache
def recorded(count: int = 4, accumulation: int = 1) -> Rehearsal:
    return record(config(count, accumulation))


def plan(count: int = 4, **fsdp: object) -> Plan:
    return make_plan(recorded(count)) if not fsdp else rehearse(config(count, **fsdp))


def config(count: int = 4, accumulation: int = 1, **fsdp: object) -> TrainingConfig:
    shape = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    training = {"enable_gradient_checkpointing": True, "gradient_accumulation_steps": accumulation}
    training |= {"global_batch_size": None, "per_device_train_batch_size": 1, "optimizer": "adamw_torch_fused"}
    return tiny_config(
        shape,
        model={"model_max_length": 32},
        training=training,
        gpu={**CARD, "count": count},
        fsdp={"enable_fsdp": True, **fsdp},
    )


def test_each_device_plans_its_part_of_weights_and_states():
    two, eight = (plan(count) for count in (2, 8))
    for term in ("weights", "optimizer"):
        sizes = [max(getattr(phase.terms, term) for phase in found.phases) for found in (two, eight)]
        assert sizes[0] / sizes[1] == pytest.approx(4, rel=0.1)
    assert two.checkpoint_bytes == pytest.approx(eight.checkpoint_bytes, rel=1e-3)  # numbers of steps are on each
    assert "8 devices" in "".join(eight.assumptions)


def test_gathered_blocks_are_what_each_strategy_and_prefetch_holds():
    held = {
        name: max(phase.terms.communication for phase in plan(4, **fsdp).phases)
        for name, fsdp in {
            "none": {"backward_prefetch": "NONE"},
            "plain": {},
            "zero2": {"sharding_strategy": "SHARD_GRAD_OP"},
        }.items()
    }
    assert held["none"] < held["plain"] < held["zero2"]


def test_offloaded_parts_are_on_the_host_and_gathered_blocks_on_the_device():
    held, offloaded = (plan(4, cpu_offload=value) for value in (False, True))
    for found, is_held in ((held, True), (offloaded, False)):
        by_phase = {phase.name: phase for phase in found.phases}
        assert (by_phase["optimizer_step"].terms.optimizer > 0) is is_held
        assert (by_phase["forward"].terms.weights > 0) is is_held
        assert by_phase["forward"].terms.communication > 0
        assert (by_phase["resume"].host_bytes > 0) is not is_held
    gone = max(phase.allocated_bytes for phase in held.phases if phase.name == "optimizer_step")
    assert max(phase.host_bytes for phase in offloaded.phases) == pytest.approx(gone, rel=0.5)


def test_copies_are_planned_where_they_are_whatever_offloads_shards():
    """`cpu_offload` without sharding has no effect: a warning, and no byte of the plan."""
    copies = [plan(2, enable_fsdp=False, cpu_offload=value).phases for value in (False, True)]
    assert copies[0] == copies[1]


def test_loading_holds_one_unit_whole_at_a_time():
    found = {phase.name: phase for phase in plan(4).phases}
    whole = 4 * recorded().footprint.total_parameters
    assert found["load"].allocated_bytes < 0.5 * whole


def test_going_on_from_a_checkpoint_takes_no_more_than_training():
    """Each device reads its part of the states, on the host, straight into its place."""
    found = plan(4)
    by_phase = {phase.name: phase for phase in found.phases}
    assert 0 < by_phase["resume"].allocated_bytes <= found.step_peak.allocated_bytes
    states = by_phase["resume"].terms.optimizer
    assert states == pytest.approx(by_phase["optimizer_step"].terms.optimizer, rel=0.01)


@pytest.mark.slow
def test_the_host_holds_what_a_save_writes(monkeypatch):
    """A rank its part, of which copies that are written during training are no more; the first all of what it gathers,
    with nothing of it on the device."""
    monkeypatch.setattr(host_use, "LARGEST_FILE", 1000)  # of the export, else more than a part of this small model
    base = host_use.HOST_BASE_BYTES
    whole = plan(4).checkpoint_bytes
    assert plan(4).host_bytes - base == pytest.approx(whole / 4, rel=0.01)
    assert plan(4, state_dict_type="FULL_STATE_DICT").host_bytes - base == pytest.approx(whole, rel=0.01)
    for kind, share in (("SHARDED_STATE_DICT", 4), ("FULL_STATE_DICT", 1)):
        made = config(4, state_dict_type=kind)
        training = made.training.model_copy(update={"async_save": True, "save_steps": 2})
        found = rehearse(made.model_copy(update={"training": training}))
        assert found.host_bytes - base == pytest.approx(whole / share, rel=0.01)
        assert found.peak == plan(4, state_dict_type=kind).peak


def test_every_micro_batch_gathers_and_reduces():
    one, two = (recorded(4, accumulation).trace.operations for accumulation in (1, 2))
    for name, units in ((GATHER, 2 * 5 + 1), (REDUCE, 6)):  # 4 blocks and the embedding; the head is gathered once
        counts = [sum(item.bytes > 1000 for item in found if item.name == name) for found in (one, two)]
        assert counts[1] == 2 * counts[0]
        assert counts[0] % units == 0


def test_what_each_card_sends_is_all_of_its_gradients_but_its_own_part():
    """A ring: 3/4 of the gradients' bytes on 4 cards."""
    found = recorded()
    sent = sum(item.bytes for item in found.trace.operations if item.name == REDUCE and item.bytes > 1000)
    steps = sum(mark.phase == "optimizer_step" for mark in found.trace.marks)
    assert sent / steps == pytest.approx(0.75 * 4 * found.footprint.trainable_parameters, rel=0.01)


def test_an_update_on_the_host_is_waited_for():
    """`cpu_offload`: a device's part of weights, gradients and two states is read, of weights and states written."""
    made = config(2, cpu_offload=True).model_copy(update={"gpu": H100.model_copy(update={"count": 2})})
    rehearsal = record(made)
    before = step_time(rehearsal)
    assert before is not None
    part = rehearsal.footprint.total_parameters / 2 * 4
    waited = with_update_on_host(before, rehearsal).seconds - before.seconds
    assert waited == pytest.approx((3 + 2 * 2) * part / 20e9, rel=0.02)
    plain = config(2).model_copy(update={"gpu": made.gpu})
    assert with_update_on_host(before, replace(rehearsal, config=plain)) == before

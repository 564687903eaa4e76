"""Results of a search: the changes and the gain of each, its tradeoffs, the settings it keeps, and what would fit."""

import random

import pytest

from framework.memory.requirements import with_values
from framework.memory.search.find import find
from framework.memory.search.found import Found
from framework.memory.search.free_keys import INEXACT, freedom
from framework.memory.search.space import with_rows
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.rules.every import Needs, find_conflicts
from tests.grids import first
from tests.memory.search.card import MIB, Arithmetic
from tests.memory.search.test_fastest import config_on, short_of

_SEARCHED: dict[str, Found] = {}


def found_on(config: TrainingConfig, pins: tuple[str, ...] = (), **options: object) -> Found:
    """The result of a search; several tests read the same one."""
    asked = repr((config, config.training.model_fields_set, pins, options))
    if asked not in _SEARCHED:
        found = find(config, Arithmetic(), freedom(pins), runs_here=False, **options)  # type: ignore[arg-type]
        assert found is not None
        _SEARCHED[asked] = found
    return _SEARCHED[asked]


def test_changes_add_up_from_the_request_to_the_proposal() -> None:
    found = found_on(config_on(4000))
    assert found.fits
    assert found.before is not None
    saved = sum(change.saves_bytes or 0 for change in found.changes)
    assert saved == found.before.peak.device_bytes_upper - found.plan.peak.device_bytes_upper
    assert found.before.step is not None
    assert found.plan.step is not None
    costs = sum(change.costs_seconds or 0 for change in found.changes)
    assert costs == pytest.approx(found.plan.step.seconds - found.before.step.seconds)
    assert all(change.exact for change in found.changes)


def test_the_global_batch_is_kept_and_reported() -> None:
    """8 x 4 x 2 = 64 in every proposal. Other levers are pinned: two cards have five times as many candidates."""
    config = config_on(3000, per_device_train_batch_size=8, gradient_accumulation_steps=4, global_batch_size=None)
    config = config.model_copy(update={"gpu": config.gpu.model_copy(update={"count": 2})})
    found = found_on(config, pins=("training.compile", "training.optimizer_offload", "training.allocator"))
    assert found.fits
    assert found.config.batch.global_size == 64
    assert "= 64 global / (" in found.to_json()["batch_equation"]
    assert "training.global_batch_size=64" in found.overrides
    for point in found.frontier:
        assert not any(item.startswith("training.per_device_train") for item in point.overrides) or (
            "training.global_batch_size=64" in point.overrides
        )


@pytest.mark.slow
@pytest.mark.parametrize(("usable", "is_sharded"), [(1000, True), (9000, False)])
def test_cards_split_the_weights_where_one_cannot_hold_them(usable: int, is_sharded: bool) -> None:
    config = config_on(usable, global_batch_size=32)
    several = config.model_copy(update={"gpu": config.gpu.model_copy(update={"count": 4})})
    found = found_on(several, last_resort=())
    assert found.fits
    assert found.config.fsdp.is_sharded is is_sharded
    assert all(change.exact for change in found.changes)
    assert not found_on(config, last_resort=()).config.fsdp.is_sharded


def test_a_pinned_batch_that_cannot_fit_is_no_proposal() -> None:
    found = found_on(config_on(3000), pins=("training", "model"), last_resort=())
    assert not found.fits
    assert found.changes == ()
    assert found.smallest_card == "rtx3060_12gb"


@pytest.mark.slow
def test_what_changes_the_trajectory_comes_last_and_is_named() -> None:
    usable = 1850
    assert not found_on(config_on(usable), last_resort=()).fits
    found = found_on(config_on(usable))
    given_up = [change for change in found.changes if not change.exact]
    assert found.fits
    assert given_up
    assert all(change.key in INEXACT for change in given_up)
    assert all("Changes training" in change.why for change in given_up)
    assert any(given_up[0].key in remark for remark in found.remarks)


@pytest.mark.slow
def test_what_exceeds_this_machines_host_memory_is_reported() -> None:
    """2,280 MiB with states on the host, 1,000 without."""
    ample, full = found_on(config_on(2800)), found_on(config_on(2800), shortage=short_of(1100))
    assert ample.config.training.optimizer_offload == "host"
    assert "offloading to host memory: a machine with 1 card needs up to 2.23 GiB of host memory" in ample.remarks
    assert full.fits
    assert full.config.training.optimizer_offload == "none"
    left_out = [remark for remark in full.remarks if "were left out, as this machine has too little" in remark]
    assert left_out[0].endswith("2280 MiB are needed")
    assert not any("offloading to host memory" in remark for remark in full.remarks)
    written = config_on(2800, optimizer_offload="host")
    found = found_on(written, pins=("training.optimizer_offload",), last_resort=(), shortage=short_of(1100))
    assert (found.plan.fits, found.fits, found.shortage) == (True, False, "2280 MiB are needed")


def test_a_point_is_typed_with_every_value_that_the_request_left_open() -> None:
    """Also the plain ones: pasted without them, `auto` would search again."""
    found = found_on(config_on(3000, enable_gradient_checkpointing="auto", compile="auto", activation_offload="auto"))
    typed = [dict(item.split("=") for item in point.overrides) for point in found.frontier]
    open_ = {f"training.{key}" for key in ("enable_gradient_checkpointing", "compile", "activation_offload")}
    assert len(typed) > 1
    assert all(open_ <= item.keys() for item in typed)
    assert {item["training.activation_offload"] for item in typed} >= {"false"}


def test_exact_settings_are_taken_where_they_fit() -> None:
    for usable in (3000, 6000):
        assert all(change.exact for change in found_on(config_on(usable)).changes)


def test_a_frontier_trades_memory_for_speed() -> None:
    points = found_on(config_on(4000)).frontier
    assert len(points) > 2
    assert [point.device_bytes for point in points] == sorted(point.device_bytes for point in points)
    speeds = [point.tokens_per_second or 0 for point in points]
    assert speeds == sorted(speeds)
    assert any(point.planned for point in points)


def test_every_candidate_has_bytes_and_seconds_in_the_end() -> None:
    found = found_on(config_on(4000))
    assert found.tried == found.computed > 1000
    assert found.planned < 20
    assert f"{found.tried:,} candidates, {found.computed:,} of them computed" in found.looked_at


def test_nothing_is_changed_where_the_request_is_the_fastest() -> None:
    config = config_on(80000, per_device_train_batch_size=64, optimizer="adamw_torch_fused", compile=True)
    assert found_on(config).changes == ()


def test_a_card_of_unknown_speed_is_ranked_by_another_and_promises_no_time() -> None:
    config = config_on(4000)
    facts = dict.fromkeys(("bandwidth_bytes_per_second", "fp32_flops"))
    found = found_on(config.model_copy(update={"gpu": config.gpu.model_copy(update=facts)}))
    assert found.fits
    assert all(point.tokens_per_second is None for point in found.frontier)
    assert any("is not known" in remark for remark in found.remarks)


def test_auto_alone_moves() -> None:
    config = config_on(4000, enable_gradient_checkpointing="auto", per_device_train_batch_size="auto")
    found = find(config, Arithmetic(), (), last_resort=(), runs_here=False)
    assert found is not None
    assert found.fits
    assert found.before is None
    moved = {change.key for change in found.changes}
    assert moved <= {"training.enable_gradient_checkpointing", "training.per_device_train_batch_size"}
    assert value_of(found.config, "training.compile") is False
    assert found.config.batch.global_size == 64


def test_bytes_are_those_of_the_plan() -> None:
    found = found_on(config_on(4000))
    assert found.plan.peak.device_bytes_upper <= 4000 * MIB
    assert found.to_json()["plan"]["fits"] is True


@pytest.mark.parametrize("seed", first(1, range(6)))
def test_no_change_of_a_proposal_can_be_undone_at_no_cost(seed: int) -> None:
    """Requests at random: without any one change the proposal is slower, does not fit or cannot be."""
    dice = random.Random(seed)
    batch = dice.choice([1, 2, 8])
    training = {
        "per_device_train_batch_size": batch,
        "enable_gradient_checkpointing": dice.random() < 0.5,
        "optimizer": dice.choice(["adamw_torch", "adamw_torch_fused"]),
        "optimizer_offload": dice.choice(["none", "none", "host"]),
    }
    config = config_on(dice.choice([2600, 3000, 4500, 9000, 80_000]), layers=dice.choice([4, 16]), **training)
    found = found_on(config)
    assert found.fits
    planner = Arithmetic()
    assert found.plan.step is not None
    for change in found.changes:
        if change.key == "training.per_device_train_batch_size":
            other = with_rows(found.config, 64, batch, ())
        else:
            other = with_values(found.config, {change.key: change.old})
        if any(not conflict.is_warning for conflict in find_conflicts(other, Needs())):
            continue
        plan = planner.plan(other)
        assert plan.step is not None
        assert not plan.fits or plan.step.seconds > found.plan.step.seconds, (change, training)


def test_evaluation_is_left_alone_where_there_is_none() -> None:
    """A smaller micro-batch than the rows of an evaluation that is never made."""
    found = found_on(config_on(3000))
    keys = [change.key for change in found.changes]
    assert "training.per_device_train_batch_size" in keys
    assert "training.per_device_eval_batch_size" not in keys

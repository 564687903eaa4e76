"""Padding, planned peaks and MFU of a step, against arithmetic done here."""

import pytest
import torch

from framework.compose import load
from framework.memory.ledger import StepCost
from framework.run.record.meter import padding_share, planned_series


def test_padding_is_counted_over_all_positions_of_all_micro_batches():
    padded = {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}
    full = {"input_ids": torch.zeros(1, 2)}
    assert padding_share([padded, full]) == pytest.approx(3 / 10)
    assert padding_share([]) == 0


class Planned:
    """The part of a plan that is read."""

    class peak:
        allocated_bytes, reserved_bytes = 5, 7

    step = None


def config(**training):
    written = [f"training.{name}={value}" for name, value in training.items()]
    return load("quickstart", ["gpu=h100_80gb", "gpu.count=2", "model.model_max_length=100", *written])


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [("float32", "bf16", 989.4e12), ("float32", "none", 67e12), ("bfloat16", "none", 989.4e12)],
)
def test_mfu_is_flops_over_what_the_card_can_make(dtype, precision, rate):
    made = config(global_batch_size=8, per_device_train_batch_size=2, mixed_precision_dtype=precision)
    made = made.model_copy(update={"model": made.model.model_copy(update={"torch_dtype_str": dtype})})
    plan = Planned()
    plan.step = StepCost(seconds=1.0, tokens_per_second=1.0, model_flops=10**14, bound_by="compute")
    series = planned_series(made, plan, tokens=400, seconds=2.0)  # half of 8 rows of 100 tokens
    assert series == {
        "planned_peak_allocated_bytes": 5,
        "planned_peak_reserved_bytes": 7,
        "mfu": pytest.approx(10**14 * 0.5 / 2.0 / rate, rel=1e-3),
    }


def test_without_rates_or_a_plan_less_is_reported():
    assert planned_series(config(), None, 1, 1.0) == {}
    assert "mfu" not in planned_series(config(), Planned(), 1, 1.0)

"""Step times from operator lists."""

import pytest

from framework.memory.roofline import CALIBRATED, StepTime, estimate_step, repeat_micro_batches
from framework.memory.trace import Operation
from framework.schema.gpu import GPUParams

CARD = GPUParams(
    name="card", multiprocessors=100, bandwidth_bytes_per_second=1e12, fp32_flops=1e13, bf16_flops=1e14, fp16_flops=1e14
)


def product(size: int, dtype: str = "bfloat16") -> Operation:
    shape = (1, size, size, size)
    return Operation("mm", "backward", 2 * size**3, 3 * 2 * size**2, dtype, shape)


def test_a_large_product_is_bound_by_arithmetic_in_its_dtype() -> None:
    half = estimate_step([product(8192)] * 10, CARD)
    full = estimate_step([product(8192, "float32")] * 10, CARD)
    assert half.bound_by == full.bound_by == "compute"
    share = CALIBRATED.product / CALIBRATED.product_float32
    assert full.compute == pytest.approx(10 * half.compute * share, rel=0.01)


def test_products_of_eight_bits_run_at_the_rate_of_the_card_for_them() -> None:
    card = CARD.model_copy(update={"fp8_flops": 2e14})
    half, eighth = (estimate_step([product(8192, dtype)] * 10, card) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert eighth.compute == pytest.approx(half.compute / 2, rel=0.02)


def test_a_large_copy_is_bound_by_traffic() -> None:
    time = estimate_step([Operation("mul", "forward", 0, 10**10, "bfloat16")] * 10, CARD)
    assert time.bound_by == "memory"
    assert time.memory == pytest.approx(0.1 / CALIBRATED.bandwidth)


def test_many_small_calls_are_bound_by_the_host() -> None:
    time = estimate_step([Operation("mul", "forward", 0, 1000, "bfloat16")] * 10_000, CARD)
    assert time.bound_by == "host"
    assert time.seconds > 10_000 * CALIBRATED.forward_seconds


def test_views_cost_the_host_only() -> None:
    time = estimate_step([Operation("view", "forward", 0, 0, "")] * 100, CARD)
    assert (time.compute, time.memory) == (0, 0)


def test_a_last_wave_that_is_not_full_costs_a_whole_one() -> None:
    def seconds(columns: int) -> float:
        shape = (1, 1280, columns, 8192)
        flops = 2 * 1280 * columns * 8192
        return estimate_step([Operation("mm", "forward", flops, 1, "bfloat16", shape)] * 100, CARD).compute

    assert seconds(256 * 10) == pytest.approx(seconds(256 * 9), rel=0.02)
    assert seconds(256 * 11) > 1.4 * seconds(256 * 10)


def test_micro_batches_repeat() -> None:
    two, three = StepTime(2.0, 1.0, 0.5, 0.2), StepTime(2.5, 1.3, 0.6, 0.3)
    assert repeat_micro_batches(two, three, 4).seconds == pytest.approx(4.0)


def test_what_is_copied_once_a_step_hides_no_micro_batch() -> None:
    """Copies that two micro batches do not cover are covered by six."""
    two, three = (StepTime(device, device, 0.0, 0.1, communication=1.0, alone=0.5) for device in (0.8, 1.2))
    assert two.seconds == 1.5
    assert repeat_micro_batches(two, three, 4).seconds == pytest.approx(0.8 + 4 * 0.4 + 0.5)


def test_unknown_rates_give_no_time() -> None:
    with pytest.raises(ValueError, match="24gb"):
        estimate_step([product(8)], GPUParams(name="24gb"))


def test_what_a_checkpoint_recomputes_costs_more_of_the_host_than_forward() -> None:
    def host(phase: str) -> float:
        return estimate_step([Operation("mul", phase, 0, 1000, "bfloat16")] * 1000, CARD).host

    assert host("recompute") > 1.5 * host("forward")


def test_transfers_go_beside_the_work_and_bound_the_step_when_they_are_slower() -> None:
    card = CARD.model_copy(update={"host_link_bytes_per_second": 1e10})
    work = [product(8192)] * 10
    hidden = estimate_step([*work, Operation("transfer", "forward", 0, 10**6, "")], card)
    assert hidden.seconds == pytest.approx(estimate_step(work, card).seconds, rel=0.01)
    slow = estimate_step([*work, Operation("transfer", "forward", 0, 10**11, "")], card)
    assert slow.bound_by == "communication"
    assert slow.seconds == pytest.approx(10 / CALIBRATED.link)

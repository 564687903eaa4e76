"""The two timelines of a step, from operations written by hand."""

import pytest

from framework.memory.host_time import FITTED, HostCosts
from framework.memory.roofline import CALIBRATED
from framework.memory.step_time import StepTime, estimate_step, repeat_micro_batches
from framework.memory.trace import HOLD, LINK_COPY, TRANSFER, WAIT, Launcher, Operation
from framework.schema.gpu import GPUParams

CARD = GPUParams(name="card", multiprocessors=100, bandwidth_bytes_per_second=1e12, fp32_flops=1e13, bf16_flops=1e14)
COSTS = HostCosts(**{**dict.fromkeys(FITTED.__dataclass_fields__, 0.0), "forward": 1e-3, "wait": 0.25, "step": 0.5})
LAUNCH = CALIBRATED.launch_seconds


def copy(seconds: float, phase: str = "forward") -> Operation:
    """A kernel that moves what the card moves in this time."""
    return Operation("mul", phase, 0, int(seconds * 1e12 * CALIBRATED.bandwidth), "bfloat16")


def test_a_long_kernel_hides_the_host() -> None:
    time = estimate_step([copy(1.0)] * 10, CARD, costs=COSTS)
    assert time.device == pytest.approx(0.5 + 1e-3 + 10 * (1.0 + LAUNCH))
    assert time.host == pytest.approx(0.5 + 10e-3)
    assert (time.seconds, time.bound_by) == (time.device, "memory")


def test_short_kernels_wait_for_the_host() -> None:
    time = estimate_step([copy(1e-5)] * 1000, CARD, costs=COSTS)
    assert time.device == pytest.approx(0.5 + 1.0 + 1e-5 + LAUNCH)
    assert time.bound_by == "host"


def test_host_and_card_that_take_turns_take_as_long_as_both() -> None:
    """First a long kernel, then short ones that the host issues meanwhile, then only the host works."""
    calls = [copy(1.0), *[copy(1e-6)] * 3000]
    time = estimate_step(calls, CARD, costs=COSTS)
    assert time.device == pytest.approx(0.5 + 3.001, rel=1e-3)  # the queue is empty again after a second


def test_a_wait_ends_when_the_card_has_done_all_that_was_issued() -> None:
    wait = Operation(WAIT, "optimizer_step", 0, 0, "")
    without, waits = (estimate_step([copy(1.0), *stop, copy(1.0)], CARD, costs=COSTS) for stop in ([], [wait]))
    assert without.device == pytest.approx(0.501 + 2 * (1.0 + LAUNCH))
    assert waits.device == pytest.approx(0.501 + 0.25 + 1e-3 + 2 * (1.0 + LAUNCH))
    assert waits.waits == pytest.approx(1.0 + LAUNCH)
    assert waits.bound_by == "memory"  # the host waited, it did not hold the card up


def test_micro_batches_repeat() -> None:
    two, three = StepTime(2.0, 1.0, 0.5, 0.2), StepTime(2.5, 1.3, 0.6, 0.3)
    assert repeat_micro_batches(two, three, 4).seconds == pytest.approx(4.0)


def test_what_is_copied_once_a_step_hides_no_micro_batch() -> None:
    """Copies that two micro-batches do not cover are covered by six."""
    two, three = (StepTime(device, device, 0.0, 0.1, communication=1.0, alone=0.5) for device in (0.8, 1.2))
    assert two.seconds == 1.5
    assert repeat_micro_batches(two, three, 4).seconds == pytest.approx(0.8 + 4 * 0.4 + 0.5)


def test_unknown_rates_give_no_time() -> None:
    with pytest.raises(ValueError, match="24gb"):
        estimate_step([copy(1.0)], GPUParams(name="24gb"))


def test_transfers_overlap_the_work_and_bound_the_step_when_they_are_slower() -> None:
    card = CARD.model_copy(update={"host_link_bytes_per_second": 1e10})
    work = [copy(1.0)] * 10
    hidden = estimate_step([*work, Operation("transfer", "forward", 0, 10**6, "")], card)
    assert hidden.seconds == pytest.approx(estimate_step(work, card).seconds, rel=0.01)
    slow = estimate_step([*work, Operation("transfer", "forward", 0, 10**12, "")], card)
    assert slow.bound_by == "communication"
    assert slow.seconds == pytest.approx(100 / CALIBRATED.link)


def transfer(seconds: float) -> Operation:
    """A transfer on a stream of its own that takes so long on a link of 1 GB a second."""
    return Operation(TRANSFER, "forward", 0, int(seconds * 1e9 * CALIBRATED.link), "")


LINKED = CARD.model_copy(update={"host_link_bytes_per_second": 1e9})


def test_kernels_wait_for_a_transfer_which_waits_for_kernels_and_transfers_before_it() -> None:
    """Host 0.5, a kernel until 1.5, transfers from there until 3.5 and 5.5; the last kernel waits for one of them."""
    begun = [copy(1.0), transfer(2.0), transfer(2.0), copy(1.0)]
    for newer, ends in ((0, 6.5), (1, 4.5)):
        hold = Operation(HOLD, "forward", 0, 0, "", tensors=newer)
        time = estimate_step([*begun, hold, copy(1.0)], LINKED, costs=COSTS)
        assert time.device == pytest.approx(ends, abs=0.01)
        assert time.communication == pytest.approx(4.0, abs=0.01)
    nothing = Operation(HOLD, "forward", 0, 0, "", tensors=2)
    assert estimate_step([*begun, nothing, copy(1.0)], LINKED, costs=COSTS).device == pytest.approx(3.5, abs=0.01)


def test_bitsandbytes_waits_for_transfers_as_well() -> None:
    for launcher, until in ((Launcher.TORCH, 1.5 + 0.25), (Launcher.BITSANDBYTES, 3.5)):
        wait = Operation(WAIT, "backward", 0, 0, "", launcher=launcher)
        time = estimate_step([copy(1.0), transfer(2.0), wait, copy(1.0)], LINKED, costs=COSTS)
        assert time.device == pytest.approx(until + 1.0, abs=0.01)


def test_a_copy_in_order_with_the_kernels_takes_its_time_on_the_link() -> None:
    moved = transfer(2.0)._replace(name=LINK_COPY)
    time = estimate_step([copy(1.0), moved, copy(0.5)], LINKED, costs=COSTS)
    assert time.device == pytest.approx(0.5 + 3.5, abs=0.01)
    assert (time.communication, time.bound_by) == (pytest.approx(2.0, abs=0.01), "communication")


def test_launches_of_python_code_cost_more_of_the_host_than_operators() -> None:
    def host(launcher: Launcher) -> float:
        operations = [Operation("mul", "forward", 0, 1000, "bfloat16", (), launcher)] * 1000
        return estimate_step(operations, CARD).host - FITTED.step

    assert host(Launcher.TRITON) == pytest.approx(1000 * FITTED.triton)
    assert host(Launcher.TORCH) == pytest.approx(1000 * FITTED.forward)
    assert FITTED.triton > 2 * FITTED.forward

"""Seconds of a step next to hosts of several speeds, from operations written by hand."""

from dataclasses import replace
from statistics import mean

import pytest

from framework.memory.cards import read_card
from framework.memory.host_time import FITTED
from framework.memory.roofline import CALIBRATED
from framework.memory.step_time import HOST_SHARES, step_cost, step_time
from framework.memory.trace import Footprint, Operation, Rehearsal, Space, Trace
from framework.schema.config import TrainingConfig

CALLS = 5000
FOOTPRINT = Footprint(1, 1, (4,), (4,), (8,), (Space.DEVICE,), 4, 1, 0)


def rehearsal(seconds: float) -> Rehearsal:
    """One step of many calls in backward, each of which takes the card so long."""
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    config = TrainingConfig(gpu=read_card("h100_80gb"), training=batch, model={"model_max_length": 128})
    assert config.gpu.bandwidth_bytes_per_second is not None
    seconds -= CALIBRATED.launch_seconds
    size = int(seconds * config.gpu.bandwidth_bytes_per_second * CALIBRATED.bandwidth)
    trace = Trace()
    trace.enter("end")
    for phase in ("forward", "backward", "optimizer_step"):
        trace.enter(phase)
        count = CALLS if phase == "backward" else 1
        trace.operations += [Operation("mul", phase, 0, size, "bfloat16")] * count
    trace.enter("end")
    return Rehearsal(config, trace, FOOTPRINT, micro_batches=1, read_values=())


@pytest.mark.parametrize(
    ("share", "longer"),
    [
        (4.0, 1.0),  # the card decides, whatever the host
        (0.2, mean(HOST_SHARES)),  # the host decides: a faster one gives back what a slower one takes
        (1.0, mean(max(1, share) for share in HOST_SHARES)),  # a faster one gives nothing back
    ],
)
def test_a_step_for_which_card_and_host_take_as_long_is_planned_longer(share: float, longer: float) -> None:
    found = rehearsal(share * FITTED.backward)
    alone, cost = step_time(found), step_cost(found)
    assert alone is not None
    assert cost is not None
    assert cost.seconds == pytest.approx(longer * alone.seconds, rel=0.03)


def test_an_average_on_the_host_is_waited_for() -> None:
    """1 GB of bfloat16 weights over the link, then 12 bytes a weight at 35 GB a second."""
    found = rehearsal(4 * FITTED.backward)
    sizes = {"trained_sizes": (10**9,), "state_sizes": (4 * 10**9, 2 * 10**9)}
    footprint = replace(found.footprint, **sizes, state_spaces=(Space.DEVICE, Space.HOST))
    seconds = []
    for where in ("device", "host"):
        changed = {"ema_decay": 0.9, "ema_device": where}
        training = found.config.training.model_validate({**found.config.training.model_dump(), **changed})
        config = found.config.model_copy(update={"training": training})
        cost = step_cost(replace(found, config=config, footprint=footprint))
        assert cost is not None
        seconds.append(cost.seconds)
    link = found.config.gpu.host_link_bytes_per_second
    assert link is not None
    assert seconds[1] - seconds[0] == pytest.approx(1e9 / (link * CALIBRATED.link) + 6e9 / 35e9)


def test_a_measured_host_is_the_only_one() -> None:
    found = rehearsal(0.2 * FITTED.backward)
    slow = {"python": 2, "operator": 2, "view": 2, "backward": 2, "graph": 2}
    card = found.config.gpu.model_validate({**found.config.gpu.model_dump(), "host": slow})
    config = found.config.model_copy(update={"gpu": card})
    alone, cost = step_time(found), step_cost(replace(found, config=config))
    assert alone is not None
    assert cost is not None
    assert cost.seconds == pytest.approx(2 * alone.seconds, rel=0.01)

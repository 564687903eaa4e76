import pytest
import torch
from transformers import get_scheduler

from framework.build.schedule import build_schedule
from framework.schema.choices import Scheduler
from framework.schema.training import TrainingParams


def rates(total, **keys):
    schedule = build_schedule(TrainingParams(learning_rate=1.0, **keys), total)
    return [schedule.rate(step) for step in range(1, total + 1)]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_the_schedule_counts_optimizer_steps_alone(world, accumulation):
    """Neither processes nor accumulation move the peak."""
    keys = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "gradient_accumulation_steps": accumulation}
    found = rates(100, **keys)
    assert found.index(max(found)) + 1 == 10
    assert found[9] == 1.0
    assert 0 < found[99] <= 0.01


def test_no_step_is_wasted_on_a_rate_of_zero():
    for shape in Scheduler:
        assert all(rate > 0 for rate in rates(7, lr_scheduler_type=shape, warmup_steps=3))
    assert rates(1) == [1.0]


def test_shapes():
    assert rates(5, lr_scheduler_type="linear") == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, lr_scheduler_type="constant", warmup_steps=2) == pytest.approx([0.5, 1, 1, 1])
    floor = rates(1000, lr_scheduler_type="cosine_with_min_lr", min_learning_rate=0.25)
    assert floor[-1] == pytest.approx(0.25, abs=1e-4)
    assert rates(4, warmup_steps=10)[-1] == 1.0


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("shape", "keys", "theirs"),
    [
        ("cosine_with_restarts", {"lr_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"lr_power": 2.0, "min_learning_rate": 0.1}, {"power": 2.0, "lr_end": 0.1}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"lr_decay_ratio": 0.3, "min_learning_rate": 0.2}, {"min_lr_ratio": 0.2}),
    ],
)
def test_shapes_are_those_of_transformers(shape, keys, theirs, warmup):
    """Behind the warm-up; within it ours is a step further, so that no step has rate zero."""
    total = 40
    if shape == "warmup_stable_decay":
        theirs = theirs | {"num_decay_steps": 12, "num_stable_steps": total - 12 - warmup}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kwargs = theirs or None
    steps = None if shape == "warmup_stable_decay" else total
    scheduler = get_scheduler(shape, optimizer, warmup, steps, scheduler_specific_kwargs=kwargs)
    expected = []
    for _ in range(total):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = rates(total, lr_scheduler_type=shape, warmup_steps=warmup, **keys)
    assert found[warmup:] == pytest.approx(expected[warmup:])

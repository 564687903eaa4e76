"""Gradients that ranks add up after backward: where they are, and that a plan of them is a plan of the run."""

from typing import Any

import pytest
import torch
from torch import nn

from framework.build.assembly import Assembly
from framework.build.parallel import gradient_buckets
from framework.build.parallel.gradient_buckets import GradientBuckets
from framework.build.place import real_place
from framework.build.ranks import ALONE, OutOfMemoryElsewhere, Ranks
from framework.build.verify import missing_gradients
from framework.memory.cards import read_card
from framework.memory.planning import make_plan
from framework.memory.roofline import CALIBRATED
from framework.memory.step_time import BACKWARD_SHARE, StepTime, with_gradient_exchange
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from tests.tiny import LLAMA, tiny_assembly, tiny_config, unequal_rows

CPU = real_place(torch.device("cpu"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that holds its gradients as several do."""
    monkeypatch.setattr(GradientBuckets, "_begin_alike", lambda self: None)


def assembled(**training: Any) -> Assembly:
    return tiny_assembly(
        tiny_config(
            LLAMA, training={"on_oom": "shrink", "per_device_train_batch_size": 4, **training}, gpu={"count": 2}
        )
    )


def test_gradients_stay_in_their_buckets(alone: None) -> None:
    """Over steps, and where one is dropped: the same weights as without."""
    held = assembled()
    plain = tiny_assembly(tiny_config(LLAMA, training={"per_device_train_batch_size": 4}))
    assert held.buckets is not None
    assert plain.buckets is None
    begin, end = (
        held.buckets.buckets[0].data_ptr(),
        held.buckets.buckets[-1].data_ptr() + held.buckets.buckets[-1].nbytes,
    )
    for step in (1, 2):
        for assembly in (held, plain):
            train_step(assembly, [unequal_rows(4)], step)
        held.drop_gradients()
        for parameter, other in zip(held.trained, plain.trained, strict=True):
            assert torch.equal(parameter, other)
            assert parameter.grad is not None
            assert begin <= parameter.grad.data_ptr() < end
            assert not parameter.grad.any()


def test_buckets_are_of_one_dtype_aligned_and_of_limited_size(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 4096)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3).bfloat16(), nn.Linear(40, 40), nn.Linear(3, 3))
    model[3].requires_grad_(requires_grad=False)
    buckets = GradientBuckets(model, CPU, ALONE).buckets
    assert [(bucket.dtype, bucket.nbytes) for bucket in buckets] == [
        (torch.bfloat16, 2 * 512),
        (torch.float32, 2 * 512),
        (torch.float32, 6656),  # alone larger than the limit
        (torch.float32, 512),
    ]
    gradients = [parameter.grad for parameter in model[:3].parameters() if parameter.grad is not None]
    starts = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    assert starts == {bucket.data_ptr() for bucket in buckets}
    assert all(gradient.storage_offset() * gradient.element_size() % 512 == 0 for gradient in gradients)
    assert model[3].weight.grad is None


def test_a_gradient_that_backward_has_not_reached_is_found(alone: None) -> None:
    assembly = assembled()
    assert len(missing_gradients(assembly)) == len(assembly.trained)
    train_step(assembly, [unequal_rows(4)], 1)
    assert not missing_gradients(assembly)


def test_nothing_is_added_up_when_memory_ran_out_elsewhere(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_failed(flag: torch.Tensor) -> None:
        assert flag.numel() == 1, "nothing but who has failed may be exchanged"
        flag.add_(1)

    monkeypatch.setattr(torch.distributed, "all_reduce", one_failed)
    buckets = GradientBuckets(nn.Linear(2, 2), CPU, Ranks(world=2, checks_in=True))
    with pytest.raises(OutOfMemoryElsewhere):
        buckets.add_up()
    Ranks(world=2, checks_in=True).check_in(has_failed=True)  # who has failed knows it


def test_the_plan_holds_the_gradients_and_waits_for_their_exchange() -> None:
    """The bytes of DDP, and a step that is longer by the part of the exchange that no longer overlaps backward."""
    card = {**read_card("h100_80gb"), "count": 2, "link_bytes_per_second": 1e6}
    sizes = {"per_device_train_batch_size": 2, "global_batch_size": 8}
    ddp, ours = (
        record(tiny_config(LLAMA, gpu=card, training={"on_oom": word, **sizes})) for word in ("stop", "shrink")
    )
    plans = make_plan(ddp), make_plan(ours)
    assert plans[0].step_peak.allocated_bytes == plans[1].step_peak.allocated_bytes
    assert plans[0].step_peak.terms.gradients == plans[1].step_peak.terms.gradients
    assert any("all-reduced after backward" in line for line in plans[1].assumptions)
    computed = StepTime(device=0.1, compute=0.1, memory=0.0, host=0.05)
    overlapped, after = (with_gradient_exchange(computed, rehearsal).seconds for rehearsal in (ddp, ours))
    exchange = after - computed.seconds
    assert exchange == pytest.approx(sum(ours.footprint.trained_sizes) / 1e6 / CALIBRATED.card_link)
    assert exchange > 0.1, "too short for this test to tell"
    assert after - overlapped == pytest.approx(BACKWARD_SHARE * 0.1 / 2)

"""`empty_device_cache_steps`: counted in the run, replayed in the plan, and no way to a lower allocated peak."""

from dataclasses import replace

import pytest
import torch

from framework.build.levers.allocator import DeviceCache
from framework.build.verify import verify_emptied_cache
from framework.errors import VerificationFailed
from framework.memory.planning import make_plan
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from tests.run.reference import H100
from tests.tiny import LLAMA, split, tiny_assembly, tiny_config, unequal_rows

WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 4}


def emptying(every, **sections):
    training = {"empty_device_cache_steps": every, **sections.pop("training", {})}
    return tiny_config(sections.pop("architecture", LLAMA), training=training, **sections)


def test_the_step_empties_the_cache_every_nth_time(monkeypatch):
    assembly, calls = tiny_assembly(emptying(2)), []
    assembly.cache.place = replace(assembly.place, kind="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(len(calls)))
    for step in range(1, 6):
        train_step(assembly, split(unequal_rows(), 8), step)
    assert (len(calls), assembly.cache.emptied) == (2, 2)


def test_on_the_cpu_the_times_are_counted_and_nothing_is_called(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("there is no cache"))
    assembly = tiny_assembly(emptying(1))
    train_step(assembly, split(unequal_rows(), 8), 1)
    (reading,) = verify_emptied_cache(assembly, 1, 1)
    assert (reading.found, "no cache" in reading.source) == ("emptied 1 time", True)


def test_a_cache_that_was_not_emptied_stops_the_run():
    assembly = replace(tiny_assembly(emptying(3)), cache=DeviceCache(tiny_assembly(tiny_config()).place, 3))
    assert verify_emptied_cache(assembly, 1, 2)
    with pytest.raises(VerificationFailed, match="asked emptied 1 time, in effect emptied 0 times"):
        verify_emptied_cache(assembly, 1, 3)
    assert verify_emptied_cache(assembly, 4, 5), "a resumed run has only its own steps to answer for"


def planned(every):
    return make_plan(record(emptying(every, architecture=WIDE, gpu=H100)))


@pytest.mark.parametrize("every", [1, 2])
def test_the_plan_shows_the_same_allocated_peak(every):
    plain, emptied = planned(None), planned(every)
    assert emptied.step_peak.allocated_bytes == plain.step_peak.allocated_bytes
    interval = {1: "every step", 2: "every 2 steps"}[every]
    assert any(f"the cache is emptied {interval}:" in line for line in emptied.assumptions)
    assert emptied.step is not None
    assert emptied.step == plain.step


@pytest.mark.parametrize(("every", "times"), [(None, 1), (1, 4), (2, 2)])
def test_the_rehearsal_empties_where_the_run_does(every, times):
    """Once after loading; then after all three steps, or before the one step more that finds the cache empty."""
    trace = record(emptying(every, gpu=H100)).trace
    assert sum(mark.empties_cache for mark in trace.marks) == times
    steps = sum(mark.phase == "optimizer_step" for mark in trace.marks)
    assert steps == (4 if every == 2 else 3)


def test_expandable_segments_are_replayed():
    settings = {"expandable_segments": True}
    plain = make_plan(record(tiny_config(WIDE, gpu=H100)))
    grown = make_plan(record(tiny_config(WIDE, gpu=H100, training={"allocator": settings})))
    assert grown.peak.terms.fragmentation < plain.peak.terms.fragmentation
    assert grown.peak.allocated_bytes <= plain.peak.allocated_bytes

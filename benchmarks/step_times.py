"""What host and card each need for a step: drawn rows, timed on a machine with a card.

python benchmarks/step_times.py OUT.jsonl TOTAL_SECONDS SEED:NAME ...     e.g. 20261129:lora-02

A row is one of `drawn.py`'s, by seed and the beginning of its name. Each result has the steps, what the host took to
issue each of their phases, the speed of the host before each and after the last, and the kernels of one more step.
Rows with Liger's kernels and compiled ones come last, in processes of their own: their patches stay.
"""

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.drawn import config_of, drawn
from benchmarks.rows import Queue, run_rows
from framework.schema.config import TrainingConfig

WARM_UPS, STEPS = 2, 12
LISTED = 40
"""Kernels that are listed, by name; the others are summed up."""
SECONDS = 60
"""After which a row is ended."""
CALLS = 60
"""Calls of each kind in one measurement of the host's speed: about a millisecond."""


def measure(row: Mapping[str, Any]) -> dict[str, Any]:
    """Host and card of one row; what it took of the card is free for the next."""
    import torch

    found = timed(config_of(row))
    gc.collect()
    torch.cuda.empty_cache()
    return {"measured": found}


def timed(config: TrainingConfig) -> dict[str, Any]:
    """Host and card of a config's step, in seconds and milliseconds as their names say."""
    import torch

    from framework.build.place import real_place
    from framework.run.planning.measure import assembled_at_random, synthetic_batches
    from framework.run.step import train_step

    torch.manual_seed(config.training.seed)
    assembly = assembled_at_random(config, real_place(torch.device("cuda", 0)))
    batches, numbers, speed = synthetic_batches(assembly), iter(range(1, 1000)), speed_probe()
    marks: list[tuple[str, float]] = []

    def step() -> None:
        marks.clear()
        train_step(assembly, batches, next(numbers), lambda phase: marks.append((phase, time.perf_counter())))
        torch.cuda.synchronize()

    steps, hosts, speeds = [], [], []
    for _ in range(WARM_UPS + STEPS):
        torch.cuda.synchronize()
        speeds.append(round(1e3 * speed(), 3))
        start = time.perf_counter()
        step()
        steps.append(time.perf_counter() - start)
        hosts.append(milliseconds(marks))
    speeds.append(round(1e3 * speed(), 3))
    found = {"step_seconds": statistics.median(steps[WARM_UPS:]), "steps": steps[WARM_UPS:]}
    return {**found, "host_ms": hosts[WARM_UPS:], "speed_ms": speeds[WARM_UPS:], **profiled(step)}


def milliseconds(marks: list[tuple[str, float]]) -> dict[str, float]:
    """What the host took for each phase but the last, in which it waits for the card."""
    taken: dict[str, float] = defaultdict(float)
    for (phase, begin), (_, end) in pairwise(marks):
        taken[phase] += 1e3 * (end - begin)
    return {phase: round(value, 3) for phase, value in taken.items()}


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """What the card did in one step: seconds in which it was busy, launches, (name, calls, milliseconds) of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans = []
    for event in found.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()):
            kernels[event.name()[:120]][0] += 1
            kernels[event.name()[:120]][1] += event.duration_ns() / 1e6
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy, until = 0, 0
    for start, end in sorted(spans):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    rows = sorted(((name, int(calls), round(ms, 4)) for name, (calls, ms) in kernels.items()), key=lambda row: -row[2])
    others = rows[LISTED:]
    rest = ("others", sum(row[1] for row in others), round(sum(row[2] for row in others), 4))
    return {"busy_seconds": busy / 1e9, "launches": len(spans), "kernels": [*rows[:LISTED], rest]}


def speed_probe() -> Callable[[], float]:
    """Seconds of a millisecond of Python, dispatcher and autograd, which a processor's other speed makes 1.7."""
    import torch
    from torch import nn

    leaf, module = torch.ones(8, requires_grad=True), nn.Identity()
    module.register_forward_hook(lambda *_: None)

    def call() -> float:
        start = time.perf_counter()
        value = leaf
        for _ in range(CALLS):
            module(leaf)
            leaf.view(2, 4)
            value = value * 1.5
        value.sum().backward()  # type: ignore[no-untyped-call]
        leaf.grad = None
        return time.perf_counter() - start

    for _ in range(20):
        call()
    return call


def main() -> None:
    import torch

    out, total, *names = sys.argv[1:]
    end, rows = time.monotonic() + float(total), []
    for seed, _, name in (word.partition(":") for word in names):
        rows += [row for row in drawn("single", int(seed)) if row["name"].startswith(name)]
    groups: dict[str, list[dict[str, Any]]] = {"plain": [], "liger": [], "compile": []}
    for row in rows:
        groups[next((word for word in ("compile", "liger") if word in row["name"]), "plain")].append(row)
    queues = [Queue((card,)) for card in range(torch.cuda.device_count())]
    for group in groups.values():
        run_rows(group, measure, Path(out), queues, seconds=SECONDS, kept=len(group) or 1, total=end - time.monotonic())


if __name__ == "__main__":
    main()

"""Time the steps of many rows in one process of a machine with a card, and the kernels of one step of each.

python benchmarks/step_times.py ROWS.jsonl RESULT.jsonl SECONDS [kernels]

A row has `name` and `config` (without `gpu`). Rows follow one another until SECONDS have passed; each result has the
row, the median step and, with `kernels`, the milliseconds and number of its kernels by name. First and last is a row
`host` with the host's seconds by kind of call. Liger's patches stay in a process: give its rows the end of a file.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from framework.build.assembly import Assembly
from framework.build.losses.loss import Batch
from framework.build.place import real_place
from framework.memory.cards import read_card
from framework.run.planning.host_probe import probe_host
from framework.run.planning.measure import assembled_at_random, synthetic_batches
from framework.run.step import train_step
from framework.schema.config import TrainingConfig

CARD = "h200_141gb"
WARM_UPS, STEPS = 2, 6
LONGEST = 60
"""Kernels that are listed, by name; the others are summed up."""


def timed(config: TrainingConfig, with_kernels: bool) -> dict[str, Any]:
    """Seconds of a step, and its kernels if wanted."""
    place = real_place(torch.device("cuda", 0))
    torch.manual_seed(config.training.seed)
    assembly = assembled_at_random(config, place)
    batches = synthetic_batches(assembly)
    step = _numbered(assembly, batches)
    for _ in range(WARM_UPS):
        step()
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "step_seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "kernels": _kernels(step) if with_kernels else [],
    }


def _numbered(assembly: Assembly, batches: list[Batch]) -> Callable[[], None]:
    numbers = iter(range(1, 1000))

    def step() -> None:
        train_step(assembly, batches, next(numbers))

    return step


def _kernels(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """(name, calls, milliseconds) of the longest kernels of one step, and of all others together."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = [(event.key[:100], event.count, event.device_time_total / 1e3) for event in found.key_averages()]
    rows.sort(key=lambda row: -row[2])
    others = rows[LONGEST:]
    return [*rows[:LONGEST], ("others", sum(row[1] for row in others), sum(row[2] for row in others))]


def main() -> None:
    source, target, limit, *switches = sys.argv[1:]
    end = time.monotonic() + float(limit)
    gpu = read_card(CARD)
    with Path(target).open("w") as results:
        results.write(json.dumps({"name": "host", "seconds": probe_host().seconds}) + "\n")
        for line in Path(source).read_text().splitlines():
            row = json.loads(line)
            if time.monotonic() > end:
                print("no time left for", row["name"])
                continue
            begin = time.monotonic()
            try:
                row["measured"] = timed(TrainingConfig.model_validate({**row["config"], "gpu": gpu}), bool(switches))
                print(row["name"], f"{row['measured']['step_seconds']:.4f} s", end=" ")
            except Exception as error:  # the other rows are measured all the same
                row["error"] = repr(error)[:300]
                print(row["name"], row["error"], end=" ")
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            row["taken_seconds"] = time.monotonic() - begin
            print(f"({row['taken_seconds']:.1f} s)", flush=True)
            results.write(json.dumps(row) + "\n")
            results.flush()
        results.write(json.dumps({"name": "host", "seconds": probe_host().seconds}) + "\n")


if __name__ == "__main__":
    main()

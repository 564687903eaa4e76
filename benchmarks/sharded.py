"""Sharded steps on the cards of one machine: what each takes, and whether its losses are those of one card.

    torchrun --nproc-per-node 2 benchmarks/sharded.py OUT.jsonl [NAME ...]

A line a row, from the first rank. `benchmarks/sharded_rows.py` has the rows, which a plan can be made of anywhere.
"""

import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharded_rows import CURVES, ROWS, curve_config, step_config
from framework.build.assembly import Assembly, assemble
from framework.build.data.batches import full_batch
from framework.build.losses.loss import Batch
from framework.build.place import real_place
from framework.build.ranks import ALONE, Ranks
from framework.build.resolve_model import settle
from framework.run.step import train_step
from framework.schema.config import TrainingConfig

STEPS = 8


def built(config: TrainingConfig, ranks: Ranks) -> Assembly:
    torch.manual_seed(config.training.seed)
    config, architecture = settle(config)
    place = real_place(torch.device("cuda", torch.cuda.current_device()))
    return assemble(config, architecture, place, 1000, ranks)


def batches(assembly: Assembly, rows: torch.Tensor) -> list[Batch]:
    """The rows as micro batches of the planned size."""
    size = assembly.config.batch.per_device
    return [full_batch(assembly.config, rows[first : first + size]) for first in range(0, len(rows), size)]


def step_row(row: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    config = step_config(row, ranks.world)
    assembly = built(config, ranks)
    config = assembly.config
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, seconds = torch.cuda.memory_allocated(), []
    shape = (config.batch.per_device * config.batch.accumulation, config.longest)
    rows = torch.randint(0, 1000, shape, device="cuda")
    for step in range(1, STEPS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_step(assembly, batches(assembly, rows), step)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    phases = phase_seconds(assembly, batches(assembly, rows), STEPS + 1)
    free, total = torch.cuda.mem_get_info()
    sizes = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    others = total - free - torch.cuda.memory_reserved()
    return {
        **row,
        **sizes,
        "step_seconds": statistics.median(seconds[3:]),
        "base": base,
        "beside_torch": others,
        "phases": phases,
    }


def phase_seconds(assembly: Assembly, micro_batches: list[Batch], step: int) -> dict[str, float]:
    """Seconds of each phase of one step that waits for the card between them."""
    seen: list[tuple[str, float]] = []

    def observe(phase: str) -> None:
        torch.cuda.synchronize()
        seen.append((phase, time.perf_counter()))

    train_step(assembly, micro_batches, step, observe)
    found: dict[str, float] = {}
    for (phase, start), (_, end) in itertools.pairwise(seen):
        found[phase] = found.get(phase, 0.0) + end - start
    return found


def same_start(ranks: Ranks) -> str:
    """The folder of the weights that every curve begins with: ranks draw others than one card does."""
    folder = Path(tempfile.gettempdir()) / "sharded-curves"
    if ranks.is_main:
        model = built(curve_config(CURVES[0], 1), ALONE).model
        model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    return str(folder)


def curve_row(row: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Losses of `steps` steps over the same rows in the same global batches, from the same weights."""
    config = curve_config(row, ranks.world, same_start(ranks))
    assembly = built(config, ranks if row["world"] else ALONE)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 512, (row["steps"], 8, 256), generator=generator)
    data[:, :, ::2] = data[:, :, 1::2]  # something to learn
    share = 8 // config.batch.world
    first = assembly.ranks.rank // config.sharing * share
    losses = []
    for step in range(row["steps"]):
        rows = data[step, first : first + share].cuda()
        losses.append(train_step(assembly, batches(assembly, rows), step + 1).loss)
    return {**row, "losses": losses}


def main() -> None:
    import os

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5), device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    ranks = Ranks(rank, world, rank, world)
    chosen = sys.argv[2:]
    with Path(sys.argv[1]).open("a") as out:
        for make, rows in ((step_row, ROWS), (curve_row, CURVES)):
            for row in rows:
                if (chosen and row["name"] not in chosen) or world < row.get("cards", 0):
                    continue
                try:
                    document = make(row, ranks)
                except Exception as error:
                    document = {**row, "error": f"{type(error).__name__}: {error}"[:400]}
                    if rank == 0:
                        import traceback

                        traceback.print_exc(limit=-6)
                gc.collect()
                torch.cuda.empty_cache()
                document |= {"cards": world, "card": torch.cuda.get_device_name(), "torch": torch.__version__}
                if rank == 0:
                    print(json.dumps(document), file=out, flush=True)
                    print({k: v for k, v in document.items() if k != "losses"}, flush=True)
                if "error" in document:
                    return
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

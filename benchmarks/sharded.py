"""Sharded steps on the cards of one machine: memory and time of each, and losses compared with those of one card.

    python benchmarks/sharded.py OUT.jsonl CARDS [NAME ...]     with fewer cards: with gloo, which is slow

The first rank writes one line per row. The rows are in `sharded_rows.py`, from which any machine can make plans.
"""

import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.drawn import config_of
from benchmarks.rows import Queue, run_rows
from benchmarks.sharded_rows import CURVES, ROWS, curve_config, step_config
from framework.build.assembly import Assembly, assemble
from framework.build.data.batches import full_batch
from framework.build.losses.loss import Batch
from framework.build.place import real_place
from framework.build.ranks import ALONE, Ranks
from framework.build.resolve_model import settle
from framework.run.step import launch_step, train_step
from framework.schema.config import TrainingConfig

STEPS = 8
SECONDS, TOTAL = 90, 600
"""Timeouts of a row and of all rows."""
IS_CUDA = torch.cuda.is_available()


def joined() -> Ranks:
    """The ranks of this process among those that measure together."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if IS_CUDA:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        has_own = IS_CUDA and torch.cuda.device_count() >= world  # NCCL refuses ranks that share a card
        backend, bound = ("cpu:gloo,cuda:nccl", torch.device("cuda", rank)) if has_own else ("gloo", None)
        dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=bound)
        dist.all_reduce(torch.ones(1 << 20, device="cuda" if IS_CUDA else "cpu"))
        synchronize()
    return Ranks(rank, world, rank, world)


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def built(config: TrainingConfig, ranks: Ranks) -> Assembly:
    torch.manual_seed(config.training.seed)
    config, architecture = settle(config)
    device = torch.device("cuda", torch.cuda.current_device()) if IS_CUDA else torch.device("cpu")
    return assemble(config, architecture, real_place(device), 1000, ranks)


def batches(assembly: Assembly, rows: torch.Tensor) -> list[Batch]:
    """The rows as micro-batches of the planned size."""
    size = assembly.config.batch.per_device
    return [full_batch(assembly.config, rows[first : first + size]) for first in range(0, len(rows), size)]


def stepped(config: TrainingConfig, ranks: Ranks) -> dict[str, Any]:
    """Peak bytes of the first card, and the median seconds of the steps after the third."""
    assembly = built(config, ranks)
    config = assembly.config
    gc.collect()
    base, seconds = 0, []
    if IS_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    shape = (config.batch.per_device * config.batch.accumulation, config.longest)
    rows = torch.randint(0, 1000, shape, device=assembly.place.device)
    for step in range(1, STEPS + 1):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        train_step(assembly, batches(assembly, rows), step)
        synchronize()
        seconds.append(time.perf_counter() - start)
    phases = phase_seconds(assembly, batches(assembly, rows), STEPS + 1)
    found: dict[str, Any] = {"step_seconds": statistics.median(seconds[3:]), "base": base, "phases": phases}
    if IS_CUDA:
        free, total = torch.cuda.mem_get_info()
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["beside_torch"] = total - free - torch.cuda.memory_reserved()
    return found


def phase_seconds(assembly: Assembly, micro_batches: list[Batch], step: int) -> dict[str, float]:
    """Seconds of each phase of one step that waits for the card between phases."""
    seen: list[tuple[str, float]] = []

    def observe(phase: str) -> None:
        synchronize()
        seen.append((phase, time.perf_counter()))

    train_step(assembly, micro_batches, step, observe)
    found: dict[str, float] = {}
    for (phase, start), (_, end) in itertools.pairwise(seen):
        found[phase] = found.get(phase, 0.0) + end - start
    return found


def same_start(row: Mapping[str, Any], ranks: Ranks) -> str:
    """Folder of the initial weights of a model's curves: ranks would draw others than one card does."""
    folder = Path(tempfile.gettempdir()) / f"sharded-curves-{'moe' if row.get('moe') else 'llama'}"
    if ranks.is_main:
        plain = {key: row[key] for key in ("moe", "shape") if key in row}
        model = built(curve_config({"world": False, **plain}, 1), ALONE).model
        model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    return str(folder)


def seed_adapters(assembly: Assembly) -> None:
    """Set the adapters' first matrices to values that depend only on their names, on any number of ranks."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in assembly.model.named_parameters():
        if "lora_A" not in name:
            continue
        name = name[name.index("layers.") :]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
            parameter.copy_(drawn)


def curve_row(row: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Losses of `steps` steps on the same rows in the same global batches, from the same weights."""
    config = curve_config(row, ranks.world, same_start(row, ranks))
    assembly = built(config, ranks if row["world"] else ALONE)
    if row.get("dora"):
        seed_adapters(assembly)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 512, (row["steps"], 8, 256), generator=generator)
    data[:, :, ::2] = data[:, :, 1::2]  # something to learn
    share = 8 // config.batch.world
    first = assembly.ranks.rank // config.sharing * share
    losses, last = [], None
    for step in range(row["steps"]):  # the figures of a step are read while the next one runs, as `train` does
        rows = data[step, first : first + share].to(assembly.place.device)
        launched = launch_step(assembly, batches(assembly, rows), step + 1)
        losses += [last.result().loss] if last is not None else []
        last = launched
    assert last is not None
    return {"losses": [*losses, last.result().loss]}


def measure_named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a row of `sharded_rows.py`."""
    ranks = joined()
    found = curve_row(row, ranks) if "steps" in row else stepped(step_config(dict(row), ranks.world), ranks)
    clean()
    card = torch.cuda.get_device_name() if IS_CUDA else "cpu"
    return {**row, **found, "cards": ranks.world, "card": card, "torch": torch.__version__}


def measure_drawn(row: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a row of `drawn.py`."""
    found = stepped(config_of(row), joined())
    clean()
    return {"measured": found}


def clean() -> None:
    """Free everything of a row on the card: a cuBLAS workspace would keep the segment that contains it."""
    gc.collect()
    torch._dynamo.reset()
    if IS_CUDA:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def main() -> None:
    out, world, chosen = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rows = [row for row in (*ROWS, *CURVES) if world >= row.get("cards", 0)]
    rows = [row for row in rows if not chosen or row["name"] in chosen]
    run_rows(rows, measure_named, out, [Queue(tuple(range(world)))], seconds=SECONDS, kept=len(rows), total=TOTAL)


if __name__ == "__main__":
    main()

"""Sharded training compared with the usual alternatives and with one card: tokens/s, memory, loss.

    PYTHONPATH=. python -m torch.distributed.run --nproc-per-node 4 benchmarks/against_fsdp.py OUT.jsonl [ROW ...]
    PYTHONPATH=. python benchmarks/against_fsdp.py summary OUT.jsonl benchmarks/results/against_fsdp_h200.json

The first rank writes one line per row. Rows: `ours-8b`, `ours-8b-fastest`, `hand-8b` and `accelerate-8b`, the first
three also with `-compiled`; the same with the 3B for cards that are too small for the 8B; `alone-1b` (on the first
card, while the others wait), `ours-1b-weak`, `ours-1b-weak-ddp`.
Without names all rows run, those of the 3B only if `ours-8b` or `hand-8b` ran out of memory. A row may be named twice.
`accelerate-8b-gc` runs only if named: it checkpoints with the Trainer's own option, which the Trainer advises against.
--micro N: rows per card for the 8B and the 3B instead of 1. --tiny: small shapes on the CPU, to test the script.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharded_rows import step_config
from framework.build.assembly import assemble
from framework.build.data.batches import full_batch
from framework.build.place import real_place
from framework.build.ranks import ALONE, Ranks
from framework.build.resolve_model import settle
from framework.run.step import train_step

WARM, STEPS = 3, 11
_FASTEST = {"gc": False, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}
_COMPILED = {"changes": ["training.compile=true"]}
_1B = {"model": "llama3.2_1b", "micro": 4, "gc": True}
_ALONE = {"fsdp": {"sharding_strategy": "NO_SHARD"}}


def _sized(size: str, model: str) -> tuple[dict[str, Any], ...]:
    shape = {"model": model, "micro": 1, "gc": True}
    return (
        {"name": f"ours-{size}", "who": "ours", **shape},
        {"name": f"hand-{size}", "who": "hand", **shape},
        {"name": f"ours-{size}-compiled", "who": "ours", **shape, **_COMPILED},
        {"name": f"hand-{size}-compiled", "who": "hand", **shape, **_COMPILED},
        {"name": f"ours-{size}-fastest", "who": "ours", **shape, **_FASTEST},
        {"name": f"ours-{size}-fastest-compiled", "who": "ours", **shape, **_FASTEST, **_COMPILED},
    )


def _trained(size: str, model: str) -> tuple[dict[str, Any], ...]:
    shape = {"model": model, "micro": 1, "gc": True}
    return (
        {"name": f"accelerate-{size}", "who": "accelerate", **shape},
        {"name": f"accelerate-{size}-gc", "who": "accelerate", **shape, "trainers_checkpoints": True},
    )


ROWS: tuple[dict[str, Any], ...] = (
    {"name": "alone-1b", "who": "alone", **_1B, **_ALONE},
    {"name": "ours-1b-weak", "who": "ours", **_1B},
    {"name": "ours-1b-weak-ddp", "who": "ours", **_1B, **_ALONE},
    *_sized("8b", "llama3.1_8b"),
    *_sized("3b", "llama3.2_3b"),
    *_trained("8b", "llama3.1_8b"),  # last: it leaves settings of accelerate's in the process
    *_trained("3b", "llama3.2_3b"),
)
TINY = [f"model.architecture.{key}" for key in ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=3")]
TINY += [f"model.architecture.{key}" for key in ("num_attention_heads=4", "num_key_value_heads=2", "vocab_size=1000")]
OUT_OF_MEMORY = "out of memory"
PATIENCE = timedelta(seconds=90)
"""Timeout of ranks between rows: longer than one card takes for a row that only it runs."""
BOUNDS = {"ours over hand": 0.9, "ours over accelerate": 1.3, "weak scaling": 0.9}


@dataclass
class Clock:
    """End of each step on the card, and peak memory since the start of the first."""

    device: torch.device
    ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def figures(self, tokens: int) -> dict[str, Any]:
        """Tokens/s of steps with that many tokens on this card."""
        seconds = [end - start for start, end in zip(self.ends[WARM - 1 :], self.ends[WARM:], strict=False)]
        step = statistics.median(seconds)
        found: dict[str, Any] = {"tokens_per_second_per_gpu": round(tokens / step, 1), "step_seconds": round(step, 5)}
        found["seconds"] = [round(one, 5) for one in seconds]
        if self.device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found


def by_us(config: Any, data: torch.Tensor, device: torch.device, clock: Clock, ranks: Ranks) -> float:
    """Tunesmith's step. Arguments and result as in `rivals_fsdp`."""
    torch.manual_seed(config.training.seed)
    config, architecture = settle(config)
    assembly = assemble(config, architecture, real_place(device), 1000, ranks)
    clock.start()
    losses = []
    for step, rows in enumerate(data[:, ranks.rank], 1):
        losses.append(train_step(assembly, [full_batch(config, rows.to(device))], step).loss)
        clock.tick()
    return statistics.fmean(losses)


def measure(row: dict[str, Any], device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """Train one row. Ranks that it does not need return at once."""
    from benchmarks.rivals_fsdp import by_hand, by_trainer

    if row["who"] == "alone":
        if not ranks.is_main:
            return {}
        ranks = ALONE
    config, clock = step_config(row, ranks.world), Clock(device)
    tokens = int(config.model.model_max_length)  # type: ignore[call-overload]
    shape = (STEPS, ranks.world, row["micro"], tokens)
    data = torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(1))
    assert config.model.architecture is not None
    architecture = config.model.architecture.thaw()
    if row["who"] == "hand":
        loss = by_hand(architecture, data, device, clock, is_compiled=_COMPILED["changes"][0] in row.get("changes", ()))
    elif row["who"] == "accelerate":
        loss = by_trainer(architecture, data, device, clock, row.get("trainers_checkpoints", False))
    else:
        loss = by_us(config, data, device, clock, ranks)
    return {"ranks": ranks.world, "tokens": tokens, "mean_loss": loss, **clock.figures(row["micro"] * tokens)}


def attempt(row: dict[str, Any], device: torch.device, ranks: Ranks, meeting: dist.Store) -> dict[str, Any]:
    """The result of `measure`, or the reason why a rank failed; `fatal` if another is still inside a step.

    The ranks exchange this through a separate store, since a collective would wait behind that step.
    """
    document, problem = {}, None
    try:
        document = measure(row, device, ranks)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error):
            problem = OUT_OF_MEMORY
        else:
            traceback.print_exc(limit=-6)
            problem = f"{type(error).__name__}: {error}"[:400]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    keys = [str(rank) for rank in range(ranks.world)]
    meeting.set(keys[ranks.rank], problem or "")
    try:
        meeting.wait(keys, PATIENCE)
    except RuntimeError:  # the other waits in its step for this one
        return {"error": problem or "another rank did not come", "fatal": True}
    found = next(filter(None, (meeting.get(key).decode() for key in keys)), None)
    return document if found is None else {"error": found}


def chosen(names: list[str], tiny: bool, micro: int | None) -> list[dict[str, Any]]:
    """The rows with these names, in that order; without names every row except `accelerate-8b-gc`."""
    known = {row["name"]: row for row in ROWS}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"no rows {', '.join(unknown)}; there are {', '.join(known)}")
    rows = [dict(known[name]) for name in names or known if names or not name.endswith("-gc")]
    for row in rows:
        if micro and row["model"] != _1B["model"]:
            row["micro"] = micro
        if tiny:
            row |= {"tokens": 64, "changes": [*row.get("changes", ()), *TINY]}
    return rows


def machine(device: torch.device, world: int) -> dict[str, Any]:
    """Machine and versions of a measured row."""
    names = ("torch", "transformers", "accelerate")
    card, driver = platform.machine(), None
    if device.type == "cuda":
        card = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    found = {"cards": world, "card": card, "driver": driver, "date": datetime.now(UTC).date().isoformat()}
    return {**found, "packages": {name: version(name) for name in names}}


def run(out: Path, names: list[str], tiny: bool, micro: int | None) -> None:
    rows = chosen(names, tiny, micro)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1 and any(row["who"] != "alone" for row in rows):
        raise SystemExit("one rank has alone-1b to do: name it, or start more")
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if tiny:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=3), device_id=device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    ranks, about = Ranks(rank, world, rank, world), machine(device, world)
    is_full = False
    for number, row in enumerate(rows):
        if "-3b" in row["name"] and not names and not is_full:
            continue
        start = time.perf_counter()
        document = attempt(row, device, ranks, dist.PrefixStore(f"row {number}", store))
        is_full = is_full or (row["name"] in ("ours-8b", "hand-8b") and document.get("error") == OUT_OF_MEMORY)
        is_fatal = document.pop("fatal", False)
        if rank == 0 or is_fatal:  # the first may be the one that waits
            document = {**row, **document, "row_seconds": round(time.perf_counter() - start, 1), **about}
            with out.open("a") as file:
                print(json.dumps(document), file=file)
            print(row["name"], document.get("error") or document["tokens_per_second_per_gpu"], flush=True)
        if is_fatal:
            os._exit(1)  # the rest would wait for it; the launcher ends them
    dist.destroy_process_group()


def summary(measured: Path, out: Path) -> None:
    """Medians over the runs of each row, and the promised ratios with their bounds."""
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    first = lines[0]
    for key in ("card", "driver", "packages"):
        if any(line[key] != first[key] for line in lines):
            raise SystemExit(f"rows of several machines: `{key}` differs")
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        runs = [line for line in lines if line["name"] == name]
        good = [line for line in runs if "error" not in line]
        if not good:
            rows[name] = {"error": runs[-1]["error"]}
            continue
        if len({(line["micro"], line["tokens"], line["ranks"]) for line in good}) > 1:
            raise SystemExit(f"runs of {name} are of several shapes")
        keys = ("micro", "tokens", "ranks", "gc", "fsdp", "allocated_bytes", "reserved_bytes", "mean_loss")
        rates = [line["tokens_per_second_per_gpu"] for line in good]
        rows[name] = {"tokens_per_second_per_gpu": statistics.median(rates), "runs": rates}
        rows[name] |= {key: good[-1][key] for key in keys if key in good[-1]}
    document = {
        "what": f"sharded training against others: the median of {STEPS - WARM} steps after {WARM} of warm-up",
        "weights": "random, float32; products in bfloat16; AdamW fused; checkpoints at every block where `gc`",
        "unlike": "accelerate sums gradients over the cards in bfloat16, the others in float32",
        "cards": max(line["cards"] for line in lines),
        **{key: first[key] for key in ("card", "driver", "packages", "date")},
        "ratios": ratios(rows),
        "rows": rows,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["ratios"], indent=1))


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Promised ratios of the measured rows: tokens/s per card, the bound, whether it holds."""
    pairs = {}
    for size in ("8b", "3b"):
        pairs[f"ours-{size}-compiled", f"hand-{size}-compiled"] = "ours over hand"
        for ours in (f"ours-{size}", f"ours-{size}-fastest", f"ours-{size}-compiled", f"ours-{size}-fastest-compiled"):
            pairs[ours, f"hand-{size}"] = "ours over hand"
            pairs[ours, f"accelerate-{size}"] = pairs[ours, f"accelerate-{size}-gc"] = "ours over accelerate"
    pairs["ours-1b-weak", "alone-1b"] = pairs["ours-1b-weak-ddp", "alone-1b"] = "weak scaling"
    found = {}
    for (ours, other), promise in pairs.items():
        if all("tokens_per_second_per_gpu" in rows.get(name, {}) for name in (ours, other)):
            ratio = rows[ours]["tokens_per_second_per_gpu"] / rows[other]["tokens_per_second_per_gpu"]
            bound = BOUNDS[promise]
            found[f"{ours} / {other}"] = {"ratio": round(ratio, 4), "at_least": bound, "holds": ratio >= bound}
    return found


def main() -> None:
    if sys.argv[1:2] == ["summary"]:
        summary(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--micro", type=int)
    given = parser.parse_intermixed_args()
    run(given.out, given.rows, given.tiny, given.micro)


if __name__ == "__main__":
    main()

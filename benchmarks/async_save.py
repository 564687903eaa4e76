"""Time for which a save stops training, synchronous and asynchronous (`training.async_save`).

python benchmarks/async_save.py OUT.json [--steps 6] [--saves 3] [--small | --card]

A Llama of about 100M parameters in float32 with AdamW (a checkpoint of 1.2 GB) on the CPU is saved `--saves` times with
`--steps` steps between two saves, both ways in turn, through the functions that a run calls. Reported for each save:
the seconds from the end of a step to the start of the next ("stopped"), and how many of them were spent waiting for the
writer of the previous save; the duration of the write; and, since a writer takes cores and memory from concurrent
steps, the median of all steps between two saves. `--small` tests the script; `--card` uses a model of 1.2B parameters
(a checkpoint of 15 GB) on this machine's card: `python benchmarks/async_save.py OUT.json --card --steps 30`.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from framework.build.assembly import Assembly, assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.memory.cards import detect, read_card
from framework.memory.resolve import resolve
from framework.run.checkpoints.async_writer import Writer
from framework.run.checkpoints.checkpoint import Contents, contents_of, save_checkpoint
from framework.run.rehearsal.footprint import state_tensors
from framework.run.step import train_step
from framework.schema.config import TrainingConfig

CARD = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 12}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"small": (SMALL, 2, 128), "large": (LARGE, 2, 128), "card": (CARD, 8, 1024)}
"""Shape of the model, rows, tokens of a row."""


def config_of(size: str, is_async: bool) -> TrainingConfig:
    """The run whose saves are measured."""
    shape, rows, tokens = SIZES[size]
    model = {"model_type": "llama", "vocab_size": 16_000, "tie_word_embeddings": False, **shape}
    gpu = read_card((size == "card" and detect()) or "cpu")
    return resolve(
        TrainingConfig.model_validate(
            {
                "training": {
                    "optimizer": "adamw_torch_fused",
                    "per_device_train_batch_size": rows,
                    "max_steps": 1000,
                    "save_steps": 10,
                    "async_save": is_async,
                },
                "model": {"architecture": model, "load_pretrained_weights": False, "model_max_length": tokens},
                "gpu": gpu,
            }
        )
    )


def step(assembly: Assembly, number: int) -> float:
    """Seconds of one step over random tokens."""
    shape = (int(assembly.config.training.per_device_train_batch_size), assembly.config.longest)
    ids = torch.randint(0, 16_000, shape, generator=torch.Generator().manual_seed(number)).to(assembly.place.device)
    began = time.perf_counter()
    train_step(assembly, [{"input_ids": ids, "labels": ids}], number)
    return time.perf_counter() - began


def write(folder: Path, contents: Contents) -> None:
    """Save as a run on one device does."""
    save_checkpoint(folder, contents, 1)


def measured(config: TrainingConfig, steps: int, saves: int, folder: Path) -> dict[str, Any]:
    """Stops, write times and step times of `saves` saves, after one that is not counted (it allocates the copies)."""
    torch.manual_seed(0)
    device = "cpu" if config.gpu.name == "cpu" else "cuda"
    assembly = assemble(config, read_architecture(config), real_place(torch.device(device)), 1000)
    alone = [step(assembly, number) for number in range(1, 4)][1:]
    writer, number, stopped, between = Writer(config.training.async_save), 3, list[float](), list[float]()
    for _ in range(saves + 1):
        began = time.perf_counter()
        writer.wait()
        contents = contents_of(assembly, number)
        writer.begin(contents, partial(write, folder), (*assembly.trained, *state_tensors(assembly)))
        stopped.append(time.perf_counter() - began)
        del contents
        between += [step(assembly, number := number + 1) for _ in range(steps)]
    writer.wait()
    size = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*.safetensors"))
    return {
        "parameters": sum(parameter.numel() for parameter in assembly.model.parameters()),
        "checkpoint_bytes": size,
        "stopped_seconds": [round(seconds, 3) for seconds in stopped],
        "stopped_median_without_first": round(statistics.median(stopped[1:]), 3),
        "copying_seconds_in_all": round(writer.copying, 3),
        "waiting_for_writer_seconds_in_all": round(writer.waiting, 3),
        "writing_seconds_a_save": round(writer.writing / writer.count, 3) if writer.count else None,
        "step_median_seconds": round(statistics.median(between), 3),
        "step_median_seconds_before_any_save": round(statistics.median(alone), 3),
        "seconds_of_saves_and_steps": round(sum(stopped) + sum(between), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--small", dest="size", action="store_const", const="small", default="large")
    parser.add_argument("--card", dest="size", action="store_const", const="card")
    asked = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"before the next step": [], "during training": []}
    for _ in range(2):
        for name, is_async in (("before the next step", False), ("during training", True)):
            folder = Path(tempfile.mkdtemp(dir="."))
            try:
                rows[name].append(measured(config_of(asked.size, is_async), asked.steps, asked.saves, folder))
            finally:
                shutil.rmtree(folder)
            print(name, rows[name][-1], flush=True)
    others = "" if asked.size == "card" else ", shared with other work"
    document = {
        "what": "seconds that training stands still for a save, before the next step and next to it",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores{others}",
        "card": torch.cuda.get_device_name() if asked.size == "card" else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        "date": datetime.now(UTC).date().isoformat(),
        "steps_between_saves": asked.steps,
        "rows": rows,
    }
    Path(asked.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

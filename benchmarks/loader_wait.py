"""Time that a step on the card waits for its batch, for the 1B shape, with the loader and the step that `train` uses.

python benchmarks/loader_wait.py OUT.jsonl [--steps 30] [--tiny]     (a CUDA card, about three minutes)

Llama 3.2 1B with random weights, pure bfloat16, 4 packs of 2048 tokens of Python's standard library per step. Rows in
memory are packed in advance; rows of a stream are read, tokenized and packed during the steps, 16 files at a time. Each
is measured with batches made in the training process and in worker processes.

`asked_seconds` is the host time between requesting a step's batches and having them on the device, which may still be
running the previous update. `idle_seconds` is the time between the end of the update and the arrival of the next
batches, by events on the device: the cost of the loader. Both are medians, listed with the maximum; the first steps are
left out. `--tiny` tests the script on a CPU, where host and device do not overlap and both are the same.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from framework.build.assembly import Assembly, assemble
from framework.build.data.packing import on_device
from framework.build.losses.loss import Batch
from framework.build.place import real_place
from framework.installation import shipped
from framework.memory.cards import detect, read_card
from framework.run.inputs import Inputs, read_inputs, training_batches
from framework.run.step import train_step
from framework.schema.config import TrainingConfig

WARM = 5
"""Steps that are not counted: the first creates the optimizer's states, and workers start."""
FILES = 16
"""Rows per block of the stream: about 8 steps, so that blocks are read and tokenized during the few measured steps."""
MODES = {"held": (0, 2), "streamed": (0, 1)}
"""Numbers of worker processes to measure."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}


def config_of(tiny: bool, streaming: bool, steps: int) -> TrainingConfig:
    """The measured run; `tiny` only makes its model small."""
    model: dict[str, Any] = yaml.safe_load((shipped("conf") / "model" / "llama3.2_1b.yaml").read_text())["model"]
    if tiny:
        model["architecture"] |= {**TINY, "vocab_size": 4096}
    model |= {"load_pretrained_weights": False, "tokenizer": {"train": "bpe", "vocab_size": 4096}}
    model |= {"torch_dtype_str": "float32" if tiny else "bfloat16", "model_max_length": 128 if tiny else 2048}
    training: dict[str, Any] = {"task": "pretrain", "per_device_train_batch_size": 4, "max_steps": steps}
    training |= {"mixed_precision_dtype": "none", "optimizer": "adamw_torch_fused", "learning_rate": 1e-5}
    data: dict[str, Any] = {"train": [{"path": "python_stdlib"}], "packing": True}
    data |= {"streaming": True, "shuffle_buffer": FILES} if streaming else {}
    return TrainingConfig.model_validate(
        {"training": training, "model": model, "data": data, "gpu": read_card((not tiny and detect()) or "cpu")}
    )


def measure(assembly: Assembly, steps: Iterator[list[Batch]], count: int) -> dict[str, Any]:
    """Seconds of `count` optimizer steps, and how many of them were spent waiting for batches."""
    device = assembly.place.device
    asked: list[float] = []
    waits: list[tuple[Any, Any]] = []
    began: list[float] = []
    ended = _now(device)
    for number in range(1, count + 1):
        began.append(time.perf_counter())
        batches = [on_device(device, batch) for batch in next(steps)]
        asked.append(time.perf_counter() - began[-1])
        waits.append((ended, _now(device)))
        result = train_step(assembly, batches, number)
        ended = _now(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    whole = [after - before for before, after in zip(began[WARM:], began[WARM + 1 :], strict=False)]
    idle = [_between(*wait) for wait in waits][WARM:]
    return {
        "steps": len(whole),
        "step_seconds": statistics.median(whole),
        "asked_seconds": statistics.median(asked[WARM:]),
        "asked_seconds_max": max(asked[WARM:]),
        "idle_seconds": statistics.median(idle),
        "idle_seconds_max": max(idle),
        "idle_share": sum(idle) / (sum(whole) or 1),
        "tokens": result.tokens,
        "loss": result.loss,
    }


def _now(device: torch.device) -> Any:
    """The current time: on a card, when all work so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else float(first.elapsed_time(second)) / 1000


def _measured(inputs: Inputs, assembly: Assembly, workers: int, steps: int) -> dict[str, Any]:
    config = inputs.config
    loaded = config.model_copy(update={"data": config.data.model_copy(update={"workers": workers})})
    return measure(assembly, training_batches(loaded, inputs, None).start(0), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cpu" if asked.tiny or not torch.cuda.is_available() else "cuda")
    found: dict[str, Any] = {}
    assembly = None
    for name, tried in MODES.items():
        started = time.perf_counter()
        inputs = read_inputs(config_of(asked.tiny, name == "streamed", asked.steps))
        reading = time.perf_counter() - started
        assembly = assembly or assemble(inputs.config, inputs.architecture, real_place(device), asked.steps)
        for workers in tried:
            mode = f"{name}, {workers} processes"
            found[mode] = {"reading_seconds": reading} | _measured(inputs, assembly, workers, asked.steps)
            print(mode, json.dumps(found[mode]), flush=True)
    is_card = device.type == "cuda"
    line = {
        "what": "how long a step waits for its batch",
        "device": torch.cuda.get_device_name() if is_card else "cpu",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "tiny": asked.tiny,
        "modes": found,
    }
    with asked.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

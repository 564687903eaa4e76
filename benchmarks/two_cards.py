"""`tunesmith train` on two cards with saves during training, a rank that is killed, and one that runs out of memory.

    python benchmarks/two_cards.py OUT.jsonl [CASE ...] [--cpu]     one line per case; --cpu: a smaller model with gloo

Cases run in parallel, except for `async`, whose steps are timed: it runs after the others.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS, SAVES, KILLED = 60, 10, 35
"""Steps of a run, steps between its saves, and the step after which a rank is killed."""
LIMIT = 150 if torch.cuda.is_available() else 900
"""Timeout of a run in seconds."""
SHARDS = {"enable_fsdp": True}
COPIES = {"enable_fsdp": False}


def recipe(folder: Path, is_cpu: bool, fsdp: dict[str, Any], **training: Any) -> Path:
    """A run on two cards with the standard library's sources, 4 rows of 512 tokens each."""
    shape = SHAPE | (TINY if is_cpu else {})
    common = {"task": "pretrain", "max_steps": STEPS, "save_steps": SAVES, "save_total_limit": 10}
    sizes = {"global_batch_size": 8, "per_device_train_batch_size": 4, "learning_rate": 3e-4}
    precision = {"mixed_precision_dtype": "none" if is_cpu else "bf16", "optimizer": "adamw_torch"}
    sections = {
        "training": {**common, **sizes, **precision, "output_dir": str(folder), **training},
        "model": {
            **{"architecture": shape, "load_pretrained_weights": False, "torch_dtype_str": "float32"},
            **{"model_max_length": 128 if is_cpu else 512, "tokenizer": {"train": "bpe", "vocab_size": 2048}},
        },
        "data": {"train": [{"path": "python_stdlib"}], "eval_fraction": 0},
        "fsdp": fsdp,
    }
    if is_cpu:
        sections["gpu"] = {"name": "cpu", "count": 2}
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(sections))
    return file


def started(file: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "framework", "train", str(file), "--nproc", "2", "--quiet", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Exit code and last lines of a run, which is killed if it takes too long."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output = f"{process.communicate()[0]}\nkilled after {LIMIT} s"
    return {"code": process.returncode, "said": output.splitlines()[-12:]}


def losses(folder: Path) -> dict[int, float]:
    """Metrics by step; the later ones of a step that was made twice."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def difference(one: dict[int, float], other: dict[int, float]) -> float | None:
    """The largest relative difference of two runs' losses; None if they are not of the same steps."""
    if not one or one.keys() != other.keys():
        return None
    return max(abs(other[step] / one[step] - 1) for step in one)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def killed(folder: Path, is_cpu: bool, fsdp: dict[str, Any]) -> dict[str, Any]:
    """SIGKILL to rank 1 in the middle, then a resume, compared with an undisturbed run."""
    whole = ended(started(recipe(folder / "whole", is_cpu, fsdp)))
    file = recipe(folder / "killed", is_cpu, fsdp)
    process = started(file)
    end = time.monotonic() + LIMIT
    while max(losses(folder / "killed"), default=0) < KILLED and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children() if process.poll() is None else []
    for child in children:
        if child.environ().get("RANK") == "1":
            child.kill()
    begun = time.monotonic()
    after = ended(process)
    found = {"killed": after, "ended_after_seconds": round(time.monotonic() - begun, 1)}
    found |= {"steps_told": max(losses(folder / "killed"), default=0), "saved": checkpoints(folder / "killed")}
    resumed = ended(started(file, "--resume"))
    furthest = difference(losses(folder / "whole"), losses(folder / "killed"))
    return {"whole": whole, **found, "resumed": resumed, "largest_relative_difference": furthest}


def saved_async(folder: Path, is_cpu: bool) -> dict[str, Any]:
    """The same run with synchronous and with asynchronous saves, in shards."""
    found: dict[str, Any] = {}
    for name, is_async in (("stopping", False), ("async", True)):
        out = ended(started(recipe(folder / name, is_cpu, SHARDS, async_save=is_async)))
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
        found[name] = {**out, "saved": checkpoints(folder / name)}
        if seconds:
            found[name] |= {"median_step": statistics.median(seconds), "longest_step": max(seconds[3:])}
    found["largest_relative_difference"] = difference(losses(folder / "stopping"), losses(folder / "async"))
    found["files_that_differ"] = differing(folder / "stopping" / "checkpoints", folder / "async" / "checkpoints")
    return found


def differing(one: Path, other: Path) -> list[str]:
    """Weight files with a tensor that differs from the other run's; the order of header entries may differ."""
    names = [path.relative_to(one) for path in sorted(one.rglob("*.safetensors"))]
    pairs = [(name, load_file(one / name), load_file(other / name)) for name in names]
    return [str(name) for name, a, b in pairs if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a)]


def shrinking(folder: Path, is_cpu: bool) -> dict[str, Any]:
    """`on_oom: shrink` if only rank 1 has too little memory: the tests for two cards."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "gpu", "-k", "shrink", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::SyntaxWarning"]  # of packages that are compiled while they are imported
    command += [f"--basetemp={folder / 'shrink'}", "tests/run/ranks/test_ranks_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT + 60)
    return {"code": done.returncode, "said": done.stdout.splitlines()[-30:], "errors": done.stderr.splitlines()[-10:]}


CASES: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "killed-shards": lambda folder, is_cpu: killed(folder / "shards", is_cpu, SHARDS),
    "killed-copies": lambda folder, is_cpu: killed(folder / "copies", is_cpu, COPIES),
    "shrink": shrinking,
    "async": saved_async,
}


def main() -> None:
    is_cpu, arguments = "--cpu" in sys.argv, [word for word in sys.argv[1:] if word != "--cpu"]
    out, chosen = Path(arguments[0]), arguments[1:] or list(CASES)
    lock = threading.Lock()

    def run(name: str, folder: Path) -> None:
        for part in ("shards", "copies"):
            (folder / part).mkdir(exist_ok=True)
        begun = time.monotonic()
        try:
            found = CASES[name](folder, is_cpu)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        with lock, out.open("a") as file:
            file.write(json.dumps({"name": name, "seconds": round(time.monotonic() - begun, 1), **found}) + "\n")
        print(name, json.dumps(found)[:600], flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        together = [name for name in chosen if name != "async"]
        threads = [threading.Thread(target=run, args=(name, Path(scratch))) for name in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if "async" in chosen:
            run("async", Path(scratch))


if __name__ == "__main__":
    main()

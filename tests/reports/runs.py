"""Run folders made by hand, as `train` writes them, so that each reported figure is known."""

import json
from pathlib import Path
from typing import Any

from framework.memory.ledger import Plan
from framework.run.record.predicted_and_measured import compare
from framework.schema.config import TrainingConfig
from framework.text import to_yaml
from tests.memory.explain.test_moves import lever
from tests.reports.plans import GIB, PLAN

ENVIRONMENT: dict[str, Any] = {
    "date": "2026-11-28T22:37:19+00:00",
    "command": ["/usr/bin/tunesmith", "train", "mine", "gpu=rtx4090_24gb"],
    "python": "3.11.7",
    "platform": "Linux",
    "packages": {"torch": "2.13.0", "peft": None},
    "git": "1bfc1f2a-dirty",
    "device": "cuda:0",
}
REPAIR = {"key": "training.per_device_train_batch_size", "before": 4, "after": 2, "step": 3, "phase": "backward"}


def config(**training: Any) -> TrainingConfig:
    """A config of the plan's batch."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return TrainingConfig.model_validate(
        {"training": {**sizes, **training}, "model": {"model_name": "tiny"}, "gpu": {"name": "rtx4090_24gb"}}
    )


def step(number: int, **changed: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    return {
        "step": number,
        "epoch": number / 10,
        "loss": 3 - number / 100,
        "learning_rate": 1e-4,
        "grad_norm": 1.5,
        "tokens_per_second": 16000.0,
        "step_seconds": 0.625,
        "peak_allocated_bytes": 18 * GIB,
        "peak_reserved_bytes": 19 * GIB,
        **changed,
    }


def evaluation(number: int, loss: float) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    return {"step": number, "eval_loss": loss, "perplexity": 2.0}


def make_run(
    folder: Path,
    lines: list[dict[str, Any]],
    plan: Plan | None = PLAN,
    environment: dict[str, Any] = ENVIRONMENT,
    **training: Any,
) -> Path:
    """A run that has made these steps and is still going on."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config(**training)))
    (folder / "environment.json").write_text(json.dumps(environment))
    if plan is not None:
        levers = [lever("training.optimizer", {"backward": 2 * GIB})]
        (folder / "plan.json").write_text(json.dumps({**plan.to_json(), "levers": levers}))
    if lines:
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def write_memory(folder: Path, last_step: int | None, baseline: int = 0, **changed: Any) -> None:
    """Half a GiB less than planned in backward, evaluation that was not planned; with `baseline` on the CPU."""
    phases = {"load": 2 * GIB, "backward": 18 * GIB, "eval": 7 * GIB}
    measured = {
        "counter": "resident memory of the process" if baseline else "torch.cuda allocator",
        "allocated_bytes": 18 * GIB + baseline,
        "baseline_bytes": baseline,
        "reserved_bytes": 19 * GIB,
        "phases": [{"name": name, "allocated_bytes": count + baseline} for name, count in phases.items()],
        **({} if baseline else {"device_name": "NVIDIA GeForce RTX 4090"}),
    }
    more = {"repairs": [], "floors": {"last_step": last_step, "bytes": []}, "growth": None, **changed}
    (folder / "memory.json").write_text(json.dumps({**compare(PLAN, measured), **more}))


def export(folder: Path) -> None:
    """The last file of a run."""
    (folder / "final").mkdir(exist_ok=True)
    (folder / "final" / "model.safetensors").touch()


def checkpoint(folder: Path, step: int) -> None:
    """The folder of a checkpoint."""
    (folder / "checkpoints" / f"step-{step:08}").mkdir(parents=True)

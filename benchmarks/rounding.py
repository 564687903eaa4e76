"""Does pure bfloat16 learn? Four ways to hold the same weights, the same text, seed and rates; held-out loss of each.

python benchmarks/rounding.py OUT_DIR [--size full|tiny] [--steps N] [--rate 1e-4] [--parallel 4] [--variants NAME ...]

One checkpoint with random float32 weights and one tokenizer are made first; every variant starts from them, through
`tunesmith train` in a process of its own. Text: the sources of Python's standard library, a twentieth held out.
Writes OUT_DIR/rounding.json; a variant whose run is finished is not run again. 57 million weights with --size full.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32_masters": {"dtype": "float32", "autocast": "bf16", "optimizer": "adamw_torch_fused"},
    "plain_bf16": {"dtype": "bfloat16", "autocast": "none", "optimizer": "adamw_torch_fused"},
    "stochastic_bf16": {"dtype": "bfloat16", "autocast": "none", "optimizer": "anyprecision_adamw"},
    "kahan_bf16": {"dtype": "bfloat16", "autocast": "none", "optimizer": "anyprecision_adamw", "rounding": "kahan"},
}
BASE = "fp32_masters"
SIZES = {
    "full": {"hidden": 576, "inner": 1536, "layers": 12, "heads": 9, "vocabulary": 8192, "length": 512, "rows": 16},
    "tiny": {"hidden": 64, "inner": 192, "layers": 2, "heads": 2, "vocabulary": 512, "length": 64, "rows": 4},
}
HELD_OUT = {"full": 0.05, "tiny": 0.002}
SEED = 42


def recipe(size: str, steps: int, rate: float) -> dict[str, Any]:
    """What all variants share: training on the text, with a rate as for full fine-tuning."""
    shape = SIZES[size]
    return {
        "training": {
            "task": "pretrain",
            "max_steps": steps,
            "per_device_train_batch_size": shape["rows"],
            "per_device_eval_batch_size": shape["rows"],
            "learning_rate": rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": steps // 20,
            "weight_decay": 0.01,
            "eval_steps": max(1, steps // 10) if size == "full" else steps,
            "logging_steps": max(1, steps // 10),
            "seed": SEED,
        },
        "model": {"model_max_length": shape["length"]},
        "data": {"train": [{"path": "python_stdlib"}], "eval_fraction": HELD_OUT[size]},
    }


def prepare(folder: Path, size: str, steps: int, rate: float) -> Path:
    """The recipe's path, beside one folder with the starting weights (float32) and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from framework import load
    from framework.build.data.prepare import training_texts
    from framework.build.text.tokenizer import END_TOKEN_ID, train_tokenizer

    path, start, shape = folder / "recipe.yaml", folder / "start", SIZES[size]
    document = recipe(size, steps, rate)
    document["model"]["model_name"] = str(start.absolute())
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    if not (start / "tokenizer.json").exists():
        train_tokenizer(training_texts(load(str(path))), shape["vocabulary"]).save_pretrained(start)
        torch.manual_seed(SEED)
        architecture = LlamaConfig(
            hidden_size=shape["hidden"],
            intermediate_size=shape["inner"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            vocab_size=shape["vocabulary"],
            max_position_embeddings=shape["length"],
            tie_word_embeddings=False,
            bos_token_id=END_TOKEN_ID,
            eos_token_id=END_TOKEN_ID,
        )
        AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).save_pretrained(start)
    return path


def run(folder: Path, path: Path, name: str, threads: int) -> dict[str, Any]:
    """One variant from start to end. Returns its curves, or the end of what it said when it failed."""
    variant, out = VARIANTS[name], folder / name
    overrides = [
        f"model.torch_dtype_str={variant['dtype']}",
        f"training.mixed_precision_dtype={variant['autocast']}",
        f"training.optimizer={variant['optimizer']}",
        f"training.output_dir={out.absolute()}",
    ]
    overrides += [f"training.rounding={variant['rounding']}"] if "rounding" in variant else []
    start = time.perf_counter()
    if not (out / "memory.json").exists():
        command = [sys.executable, "-m", "framework", "train", str(path), *overrides, "--overwrite"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        with (folder / f"{name}.log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
        if done.returncode:
            tail = (folder / f"{name}.log").read_text()[-1500:]
            print(f"{name}: exit {done.returncode}\n{tail}", flush=True)
            return {"error": f"exit {done.returncode}: {tail}"}
    document = read(out) | {"seconds": round(time.perf_counter() - start, 1), "overrides": overrides[:3]}
    print(name, document["eval_loss"], f"{document['seconds']} s", flush=True)
    return document


def read(out: Path) -> dict[str, Any]:
    """Held-out loss by step, mean training loss of each tenth of the steps, last held-out loss, peak of memory."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evals = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    losses = [row["loss"] for row in rows if "loss" in row]
    tenth = max(1, len(losses) // 10)
    means = [round(sum(part) / len(part), 5) for part in (losses[i : i + tenth] for i in range(0, len(losses), tenth))]
    peak = max(row.get("peak_allocated_bytes", 0) for row in rows)
    return {
        "eval_loss": evals[max(evals)],
        "eval_curve": sorted(evals.items()),
        "train_loss_of_each_tenth": means,
        "peak_allocated_bytes": peak,
    }


def conclude(folder: Path, arguments: argparse.Namespace, variants: dict[str, Any]) -> None:
    """The document: every curve, and how far each last held-out loss is from that of the float32 masters."""
    finished = {name: row for name, row in variants.items() if "error" not in row}
    if BASE in finished:
        base = finished[BASE]["eval_loss"]
        for row in finished.values():
            row["difference_per_cent"] = round(100 * (row["eval_loss"] / base - 1), 3)
    document: dict[str, Any] = {
        "question": "held-out loss of pure bfloat16 against float32 masters, same start, text, seed and rates",
        "settings": recipe(arguments.size, arguments.steps, arguments.rate) | {"shape": SIZES[arguments.size]},
    }
    for name in finished:
        environment = json.loads((folder / name / "environment.json").read_text())
        plan = json.loads((folder / name / "plan.json").read_text())
        document |= {"date": environment["date"], "packages": environment["packages"], "python": environment["python"]}
        document |= {"machine": plan["device"]["name"], "parameters": plan["parameters"]["total"]}
        measured = json.loads((folder / name / "memory.json").read_text())
        document["machine"] = measured.get("measured", {}).get("device_name") or document["machine"]
    document["variants"] = variants
    (folder / "rounding.json").write_text(json.dumps(document, indent=1) + "\n")
    for name, row in finished.items():
        print(f"{name:16s} {row['eval_loss']:.4f} {row.get('difference_per_cent', 0):+.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = prepare(folder, arguments.size, arguments.steps, arguments.rate)
    threads = max(1, (os.cpu_count() or 1) // arguments.parallel)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        rows = pool.map(lambda name: run(folder, path, name, threads), arguments.variants)
        conclude(folder, arguments, dict(zip(arguments.variants, rows, strict=True)))


if __name__ == "__main__":
    main()

"""Loss curves of the rows of race.py compared with float32 master weights, with the same text, seed and learning rates.

python benchmarks/loss_curves.py prepare ROWS.npz [--steps N]                 no card: Python's own sources as tokens
python benchmarks/loss_curves.py run ROWS.npz OUT.json [--variants NAME ...]  a card; one process per variant
python benchmarks/loss_curves.py variants                                     their names

The model is SmolLM2's 135M with 12 of its 30 blocks, from random weights, with 16 rows of 512 tokens per step. Adapters
start from the trained float32 masters, so their variants wait for those. Recorded: the loss of every step, the held-out
loss after the last, and its difference from the reference's. `masters, other order` gets the same rows in another
order: differences as large as its own are noise.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import torch
from race import BF16, CHECKPOINTS, FAST, FLOOR, FUSED, MASTERS, PURE, RECORDED, written

ROWS, LENGTH, HELD_OUT, VOCABULARY, STEPS = 16, 512, 64, 8192, 200
RATE, ADAPTER_RATE, SEED = 3e-4, 1e-3, 42
LAYERS = 12
MODEL = ["model=smollm2_135m", "model.load_pretrained_weights=false", f"model.architecture.num_hidden_layers={LAYERS}"]


@dataclass(frozen=True)
class Variant:
    """Options of a recipe. `against`: the variant whose loss it should match; itself for a reference."""

    options: dict[str, Any]
    against: str = "masters"
    is_adapter: bool = False
    other_order: bool = False


def _lora(options: dict[str, Any]) -> Variant:
    return Variant(options, "lora, masters", is_adapter=True)


VARIANTS = {
    "masters": Variant(MASTERS | FAST | FUSED),
    "masters, other order": Variant(MASTERS | FAST | FUSED, other_order=True),
    "plain bf16": Variant(BF16 | FAST | FUSED),
    "stochastic": Variant(PURE | FAST),
    "stochastic, CUDA graphs": Variant(PURE | RECORDED),
    "stochastic, not compiled": Variant(PURE | {"model.chunked_loss": True}),
    "kahan": Variant(PURE | FAST | {"training.rounding": "kahan"}),
    "masters, not clipped": Variant(MASTERS | FAST | FUSED | {"training.max_grad_norm": 0}),
    "8-bit states, in backward, checkpoints": Variant(BF16 | FAST | CHECKPOINTS | FLOOR, "masters, not clipped"),
    "fp8 tensorwise": Variant(PURE | FAST | {"training.fp8": "tensorwise"}),
    "fp8 rowwise": Variant(PURE | FAST | {"training.fp8": "rowwise"}),
    "lora, masters": _lora(MASTERS | FAST | FUSED),
    "lora": _lora(BF16 | FAST | FUSED),
    "lora, CUDA graphs": _lora(BF16 | RECORDED | FUSED),
    "lora, bf16 adapter": _lora(BF16 | FAST | FUSED | {"peft.adapter_dtype": "bfloat16"}),
    "lora, bf16 adapter, stochastic": _lora(PURE | FAST | {"peft.adapter_dtype": "bfloat16"}),
    "lora, fp8 rowwise base": _lora(BF16 | FAST | FUSED | {"training.fp8": "rowwise"}),
    "lora, fp8 tensorwise base": _lora(BF16 | FAST | FUSED | {"training.fp8": "tensorwise"}),
}
BASE = "masters"
"""The variant whose model adapters are applied to."""


def prepare(out: Path, steps: int) -> None:
    """Shuffled rows of a BPE with 8,192 tokens, trained on the sources of Python's library; the first are held out."""
    from framework import load
    from framework.build.data.prepare import training_texts
    from framework.build.text.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "text.yaml"
        recipe.write_text("training: {task: pretrain}\ndata: {train: [{path: python_stdlib}]}\n")
        texts = list(training_texts(load(str(recipe))))
    tokenizer = train_tokenizer(texts, VOCABULARY)
    count, tokens = (steps * ROWS + HELD_OUT) * LENGTH, list[int]()
    for text in texts:
        tokens += tokenizer(text)["input_ids"]
        if len(tokens) >= count:
            break
    rows = np.array(tokens[:count], dtype=np.uint16).reshape(-1, LENGTH)
    np.savez_compressed(out, rows=np.random.default_rng(SEED).permutation(rows))


def config_of(variant: Variant, base: Path | None, steps: int) -> Any:
    """The config of a variant and its architecture. Adapters are applied to the model in the folder `base`."""
    from framework import load
    from framework.build.resolve_model import settle

    shared = {
        "model.model_max_length": LENGTH,
        "data.pad_to_multiple_of": LENGTH,
        "training.per_device_train_batch_size": ROWS,
        "training.max_steps": steps,
        "training.warmup_steps": steps // 10,
        "training.learning_rate": ADAPTER_RATE if variant.is_adapter else RATE,
        "training.seed": SEED,
    }
    start = MODEL if base is None else [f"model.model_name={base}"]
    adapter = ["peft=lora", "peft.lora_r=16", "peft.lora_target_modules=[all-linear]"] if variant.is_adapter else []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "curves.yaml"
        recipe.write_text("training: {task: pretrain}\n")
        return settle(load(str(recipe), [*start, *adapter, *written(shared | variant.options)]))


def learn(name: str, rows: torch.Tensor, base: Path) -> dict[str, Any]:
    """Run one variant in this process. Writes the model that adapters start from, or waits for it."""
    from framework.build.assembly import assemble
    from framework.build.data.batches import full_batch
    from framework.build.place import real_place
    from framework.run.step import eval_step, train_step

    variant = VARIANTS[name]
    held_out, trained = rows[:HELD_OUT], rows[HELD_OUT:]
    if variant.other_order:
        trained = trained[torch.randperm(len(trained), generator=torch.Generator().manual_seed(SEED))]
    steps = len(trained) // ROWS
    while variant.is_adapter and not base.exists():
        time.sleep(0.2)
    config, architecture = config_of(variant, base if variant.is_adapter else None, steps)
    place = real_place(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    torch.manual_seed(SEED)
    assembly = assemble(config, architecture, place, total_steps=steps)
    losses = []
    for step in range(1, steps + 1):
        batch = full_batch(config, trained[(step - 1) * ROWS : step * ROWS].to(place.device))
        losses.append(train_step(assembly, [batch], step).loss)
    sums = [eval_step(assembly, full_batch(config, part.to(place.device))) for part in held_out.split(ROWS)]
    if name == BASE:
        unfinished = base.with_name("unfinished")
        assembly.model.save_pretrained(unfinished)  # type: ignore[operator]
        unfinished.rename(base)
    held = float(sum(part["loss"] for part in sums) / sum(part["terms"] for part in sums))
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"losses": [round(loss, 5) for loss in losses], "held_out": held, "machine": machine}


def run(rows: Path, out: Path, names: list[str]) -> None:
    """Run all variants in parallel, as nothing is timed. Writes one document."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        command = [sys.executable, __file__, "learn", str(rows), str(base), "--variants"]
        alone = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # as many processes as cores already
        processes = {name: Popen([*command, name], stdout=PIPE, stderr=PIPE, text=True, env=alone) for name in names}
        outputs = {name: process.communicate() for name, process in processes.items()}
    found: dict[str, Any] = {}
    for name, (printed, complained) in outputs.items():
        done = processes[name].returncode == 0
        found[name] = json.loads(printed.strip().splitlines()[-1]) if done else {"error": complained[-900:]}
    for name, row in found.items():
        reference = found.get(VARIANTS[name].against, {})
        if "error" not in row and "held_out" in reference:
            row["per_cent"] = round(100 * (row["held_out"] / reference["held_out"] - 1), 3)
            pairs = zip(row["losses"], reference["losses"], strict=True)
            row["largest_difference"] = round(max(abs(own - other) for own, other in pairs), 4)
        shown = {key: row[key] for key in ("held_out", "per_cent", "largest_difference", "error") if key in row}
        print(f"{name:40s} {json.dumps(shown)}", flush=True)
    packages = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
    document = {"date": time.strftime("%Y-%m-%d"), "packages": packages, "layers": LAYERS, "variants": found}
    out.write_text(json.dumps(document) + "\n")


def main() -> None:
    """Run one of the three commands of the docstring, or `learn`, which `run` starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["prepare", "run", "learn", "variants"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    asked = parser.parse_args()
    match asked.verb:
        case "prepare":
            prepare(asked.paths[0], asked.steps)
        case "run":
            run(asked.paths[0], asked.paths[1], asked.variants)
        case "learn":
            rows = torch.from_numpy(np.load(asked.paths[0])["rows"].astype(np.int64))
            print(json.dumps(learn(asked.variants[0], rows, asked.paths[1])))
        case _:
            print("\n".join(VARIANTS))


if __name__ == "__main__":
    main()

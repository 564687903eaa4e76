"""Each task's step on this machine's card compared with its plan, next to plain language modeling.

python benchmarks/tasks_card.py OUT.jsonl [ROW ...] [--tiny]     (a CUDA card; about 15 seconds a row)

Writes a JSON line per row: the config, the plan made in a separate process, and the figures that
`framework.run.planning.measure` found in another with random weights and the longest rows. `--tiny` tests the script on
a CPU: every row with two small blocks, planned without a card, and two steps on the same synthetic batches instead of
the measurement.
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from framework.errors import TunesmithError
from framework.installation import shipped
from framework.memory.cards import detect, read_card
from framework.memory.resolve import resolve
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.schema.config import TrainingConfig

PURE = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}
AMP = {"model.torch_dtype_str": "float32", "training.mixed_precision_dtype": "bf16"}
LORA = {
    "training.use_peft": True,
    "peft.peft_method": "lora",
    "peft.lora_r": 16,
    "peft.lora_alpha": 32,
    "peft.lora_target_modules": ["all-linear"],
}
CHUNKED = {"model.chunked_loss": True}
TEACHER = {"training.task": "distillation", "training.teacher.load_pretrained_weights": False}


def _preference(loss: str) -> dict[str, Any]:
    return {"training.task": "preference", "training.preference.loss_type": loss}


ROWS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "dpo_lora": ("qwen3_0.6b", 4, 1024, {**_preference("dpo"), **PURE, **LORA}),
    "dpo_lora_chunked": ("llama3.2_1b", 4, 1024, {**_preference("dpo"), **PURE, **LORA, **CHUNKED}),
    "dpo_reference": ("qwen3_0.6b", 4, 1024, {**_preference("dpo"), **PURE}),
    "dpo_reference_amp": ("qwen3_0.6b", 2, 1024, {**_preference("dpo"), **AMP}),
    "dpo_precomputed": (
        "qwen3_0.6b",
        4,
        1024,
        {**_preference("dpo"), **PURE, "training.preference.precompute_reference": True},
    ),
    "simpo_chunked": ("qwen3_0.6b", 4, 1024, {**_preference("simpo"), **PURE, **CHUNKED}),
    "orpo_lora": ("llama3.2_1b", 2, 1024, {**_preference("orpo"), **PURE, **LORA}),
    "kto_lora": ("llama3.2_1b", 4, 1024, {**_preference("kto"), **PURE, **LORA}),
    "kto_reference": ("qwen3_0.6b", 4, 1024, {**_preference("kto"), **PURE, **CHUNKED}),
    "reward": ("qwen3_0.6b", 4, 1024, {"training.task": "reward", **PURE}),
    "reward_lora": ("llama3.2_1b", 4, 1024, {"training.task": "reward", **PURE, **LORA}),
    "classification_bert": ("bert_base", 32, 256, {"training.task": "classification", **AMP}),
    "classification_modernbert": ("modernbert_base", 16, 512, {"training.task": "classification", **AMP}),
    "classification_lora": ("qwen3_0.6b", 8, 1024, {"training.task": "classification", **PURE, **LORA}),
    "regression": ("qwen3_0.6b", 8, 512, {"training.task": "regression", **PURE}),
    "distillation": ("qwen3_0.6b", 4, 1024, {**TEACHER, **PURE}),
    "distillation_chunked": ("qwen3_0.6b", 8, 1024, {**TEACHER, **PURE, **CHUNKED}),
    "distillation_lora_amp": ("qwen3_0.6b", 4, 1024, {**TEACHER, **AMP, **LORA}),
    "distillation_teacher_4bit": ("qwen3_0.6b", 4, 1024, {**TEACHER, **PURE, "training.teacher.bits": 4}),
    "distillation_teacher_8bit": ("qwen3_0.6b", 4, 1024, {**TEACHER, **PURE, "training.teacher.bits": 8}),
    "textcnn": ("textcnn", 64, 512, {"training.task": "classification"}),
    "tcn": ("tcn", 64, 512, {"training.task": "classification"}),
}
"""Name -> model, rows of a micro-batch, tokens of a row, and keys."""
TEACHERS_MODEL = "qwen3_1.7b"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"vocab_size": 1024, "dtype": "float32"}


def config_of(row: str, tiny: bool) -> TrainingConfig:
    """The config of a row, for this machine's card."""
    name, rows, tokens, keys = ROWS[row]
    model = {"architecture": _architecture(name, tiny), "load_pretrained_weights": False}
    model["model_max_length"] = 32 if tiny else tokens
    training = {"per_device_train_batch_size": 2 if tiny else rows, "max_steps": 100}
    training |= {"optimizer": "adamw_torch_fused"}
    tree: dict[str, Any] = {"model": model, "training": training, "gpu": read_card((not tiny and detect()) or "cpu")}
    if keys["training.task"] == "distillation":
        training["teacher"] = {"architecture": _architecture(TEACHERS_MODEL, tiny)}
    for key, value in keys.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    if tiny:
        model["torch_dtype_str"], training["mixed_precision_dtype"] = "float32", "none"
    return resolve(TrainingConfig.model_validate(tree), model["architecture"])


def _architecture(name: str, tiny: bool) -> dict[str, Any]:
    shape: dict[str, Any] = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())["model"][
        "architecture"
    ]
    if not tiny:
        return shape
    small = {key: value for key, value in TINY.items() if key in shape or key == "vocab_size"}
    small |= {"num_key_value_heads": 2} if "num_key_value_heads" in shape else {}
    small |= {"head_dim": 16} if "head_dim" in shape else {}
    ids = {key: 0 for key, value in shape.items() if key.endswith("_token_id") and value is not None}
    kept = {key: value for key, value in shape.items() if key != "layer_types"}
    return {**kept, **small, **ids}


def steps_here(config: TrainingConfig) -> dict[str, Any]:
    """Losses of two steps on the CPU, with the batches that a card would be measured with."""
    import torch

    from framework.build.place import real_place
    from framework.run.planning.measure import assembled_at_random, synthetic_batches
    from framework.run.step import train_step

    torch.manual_seed(config.training.seed)
    assembly = assembled_at_random(config, real_place(torch.device("cpu")))
    batches = synthetic_batches(assembly)
    return {"losses": [train_step(assembly, batches, step).loss for step in (1, 2)]}


def planned(row: str, tiny: bool) -> dict[str, Any]:
    """The line of a row with its plan, or with the reason why planning failed."""
    line: dict[str, Any] = {"name": row}
    try:
        config = config_of(row, tiny)
        line["config"] = config.model_dump(mode="json")
        line["plan"] = plan_in_subprocess(config).to_json()
    except (TunesmithError, ValueError) as error:
        line["error"] = f"{type(error).__name__}: {error}"
    return line


def measured(line: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """The line with the card's measurements."""
    if "error" in line:
        return line
    from framework.run.planning.measurements import measure_in_subprocess

    try:
        config = config_of(line["name"], tiny)
        found = steps_here(config) if tiny else measure_in_subprocess(config).to_json()
    except (TunesmithError, RuntimeError) as error:
        return {**line, "error": f"{type(error).__name__}: {error}"}
    return {**line, "measured": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="*", help="of " + ", ".join(ROWS))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:  # before anything is on the card
        lines = list(pool.map(lambda row: planned(row, asked.tiny), asked.rows or ROWS))
    for line in lines:
        start = time.perf_counter()
        line = measured(line, asked.tiny)
        line |= {"seconds": round(time.perf_counter() - start, 1), "date": datetime.now(UTC).date().isoformat()}
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{line['name']:26s} {line['seconds']:5.1f} s  {_summary(line)}", flush=True)


def _summary(line: dict[str, Any]) -> str:
    """Planned and measured bytes of the step's peak, and the error in per cent."""
    if "error" in line:
        return str(line["error"])[:300]
    peak, found = line["plan"]["step_peak"], line["measured"]
    if "losses" in found:
        return f"planned {peak['allocated_bytes']:,}, losses {found['losses']}"
    names = ("allocated_bytes", "reserved_bytes", "device_bytes")
    return "  ".join(f"{n[:-6]} {peak[n]:,}/{found[n]:,} {100 * (peak[n] / found[n] - 1):+.2f}%" for n in names)


if __name__ == "__main__":
    main()

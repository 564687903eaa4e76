"""The grid by which the planner is evaluated: predicted here, measured on a card, compared.

python benchmarks/plan_grid.py predict predicted.jsonl [NAME ...]      any machine
python benchmarks/plan_grid.py measure predicted.jsonl measured.jsonl  a machine with the card
python benchmarks/plan_grid.py compare predicted.jsonl measured.jsonl
python benchmarks/plan_grid.py summary predicted.jsonl measured.jsonl results/plan_grid_h100.json
"""

import json
import random
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rows import Queue, run_rows
from framework.installation import shipped
from framework.memory.cards import read_card
from framework.schema.config import TrainingConfig

CARD = "h100_80gb"
SEED = 7
"""Seed of the split into rows that calibrate the step time and rows that evaluate it."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 151936,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": 50304,
    },
    "pythia": {
        "model_type": "gpt_neox",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50304,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 65024,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
    },
    "granite": {
        "model_type": "granite",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49152,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "use_bias": True,
    },
    "stablelm": {
        "model_type": "stablelm",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 100352,
    },
    "cohere": {
        "model_type": "cohere",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 256000,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 1024,
        "vocab_size": 50272,
    },
    "phi": {
        "model_type": "phi",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "vocab_size": 51200,
    },
}
"""Shapes of families without a preset."""
LORA = {"use_peft": True}
ALL = {"lora_target_modules": ["all-linear"], "lora_r": 16, "lora_alpha": 32}

# name: (model, rows, tokens, levers). Levers: gc, chunk, fused/foreach/sgd/ada, amp/fp32/bf16, lora,
# drop, qv (default targets), ga N, fz N (first N layers and embeddings frozen), eager
GRID = """
gpt2_small 8 1024 foreach amp | gpt2_small 16 512 fused amp | gpt2_small 4 1024 sgd fp32
gpt2_small 8 1024 fused bf16 gc | gpt2_small 8 1024 ada amp | gpt2_small 2 1024 foreach fp32 eager
gpt2_medium 8 1024 fused amp | gpt2_medium 4 1024 foreach amp gc | smollm2_135m 16 1024 fused amp
smollm2_135m 4 2048 foreach fp32 | smollm2_135m 8 2048 ada bf16 | smollm2_135m 8 2048 fused amp chunk
smollm2_135m 2 8192 fused amp gc | smollm2_360m 8 2048 fused amp | smollm2_360m 4 2048 sgd bf16 chunk
smollm2_360m 2 4096 foreach amp gc chunk | smollm2_1.7b 2 2048 fused amp gc
smollm2_1.7b 4 2048 fused bf16 chunk | qwen2.5_0.5b 4 1024 fused amp | qwen2.5_0.5b 4 1024 foreach amp
qwen2.5_0.5b 8 1024 fused bf16 chunk | qwen2.5_0.5b 2 4096 fused amp gc | qwen2.5_0.5b 1 8192 ada bf16
qwen2.5_0.5b 4 1024 sgd fp32 | qwen2.5_0.5b 4 512 fused amp ga4 | qwen2.5_0.5b 2 2048 fused amp fz12
qwen2.5_1.5b 2 2048 fused amp gc | qwen2.5_1.5b 2 1024 foreach bf16 | qwen2.5_1.5b 1 4096 fused bf16 chunk gc
qwen2.5_1.5b 4 1024 lora bf16 gc | qwen3_0.6b 1 8192 fused bf16 | qwen3_0.6b 4 1024 fused amp
qwen3_0.6b 2 2048 fused amp chunk gc | qwen3_0.6b 1 16384 fused bf16 chunk gc | qwen3_0.6b 4 1024 foreach fp32
qwen3_0.6b 2 2048 ada amp | qwen3_0.6b 4 512 sgd amp ga3 | qwen3_0.6b 8 512 lora amp
qwen3_1.7b 1 2048 fused amp gc | qwen3_1.7b 2 2048 fused bf16 chunk | llama3.2_1b 4 1024 fused amp
llama3.2_1b 4 1024 foreach amp | llama3.2_1b 4 2048 fused bf16 | llama3.2_1b 4 2048 fused bf16 gc
llama3.2_1b 4 2048 fused bf16 chunk | llama3.2_1b 4 2048 fused amp chunk gc | llama3.2_1b 1 512 fused bf16
llama3.2_1b 2 4096 fused bf16 gc chunk | llama3.2_1b 1 16384 fused bf16 gc chunk | llama3.2_1b 4 1024 sgd bf16
llama3.2_1b 4 1024 ada bf16 | llama3.2_1b 2 1024 foreach fp32 | llama3.2_1b 2 1024 fused bf16 ga4
llama3.2_1b 4 1024 fused bf16 fz8 | llama3.2_1b 4 2048 lora bf16 | llama3.2_1b 4 2048 lora bf16 drop
llama3.2_1b 2 8192 lora bf16 | llama3.2_1b 4 2048 lora amp gc | llama3.2_1b 4 2048 lora bf16 qv
llama3.2_1b 1 1024 lora bf16 gc chunk | llama3.2_3b 1 1024 fused amp gc | llama3.2_3b 2 2048 fused bf16 gc
llama3.2_3b 2 1024 fused bf16 chunk | llama3.2_3b 1 2048 lora bf16 drop | llama3.2_3b 4 1024 lora bf16 gc
olmo2_1b 4 1024 fused amp | olmo2_1b 2 2048 fused bf16 gc chunk | gemma3_1b 2 1024 fused amp
gemma3_1b 1 2048 fused bf16 gc | gemma2_2b 1 1024 fused bf16 gc | gemma2_2b 1 1024 lora bf16
mistral_7b 1 1024 lora bf16 gc | mistral_7b 1 512 lora bf16 | llama3.1_8b 1 512 lora bf16 gc
llama3.1_8b 1 2048 lora bf16 gc | llama3.1_8b 4 512 lora bf16 | llama3.1_8b 4 2048 lora bf16 gc
llama3.1_8b 1 2048 lora bf16 chunk | llama3.1_8b 1 2048 lora bf16 drop gc chunk | qwen3_8b 1 1024 lora bf16 gc
llama3.1_8b 1 512 sgd bf16 gc chunk | moe 2 1024 fused bf16 | moe 2 1024 fused amp | moe 2 1024 fused bf16 gc
moe 1 2048 ada bf16 | moe 4 1024 fused bf16 chunk gc | bert_base 16 512 fused amp
bert_base 16 512 fused bf16 fz6 | bert_base 8 512 foreach fp32 | bert_base 16 512 fused amp gc
phi4_mini_4b 1 1024 lora bf16 gc | smollm3_3b 1 1024 fused bf16 gc chunk
"""

# Chosen and predicted on 2026-11-28 before any of it was measured, with the rules and constants that GRID left behind:
# other families, and other sizes, lengths and levers of the known ones.
FRESH = """
mixtral 2 1024 fused bf16 | mixtral 4 512 fused amp gc | mixtral 1 2048 lora bf16 | mixtral 2 2048 fused bf16 gc chunk
olmoe 4 1024 fused bf16 | olmoe 2 1024 fused amp | olmoe 2 2048 ada bf16 gc | moe 2 512 foreach bf16 ga2
moe 1 4096 fused bf16 gc chunk | pythia 8 1024 fused amp | pythia 4 2048 foreach bf16 gc | pythia 4 1024 sgd fp32
pythia 8 2048 lora bf16 | falcon 4 1024 fused bf16 | falcon 2 2048 fused amp gc | falcon 2 1024 lora amp
granite 4 1024 fused bf16 | granite 2 2048 fused amp gc | granite 4 2048 lora bf16 gc | starcoder2 4 1024 fused amp
starcoder2 8 1024 fused bf16 gc | starcoder2 2 2048 ada bf16 | stablelm 4 1024 fused bf16 chunk
stablelm 2 1024 fused amp | stablelm 2 4096 fused bf16 gc | cohere 2 1024 fused bf16 | cohere 4 1024 lora bf16 gc
opt 8 1024 fused amp | opt 4 2048 fused bf16 | opt 16 512 foreach amp gc | phi 4 1024 fused bf16
phi 2 2048 fused amp gc chunk | phi 4 2048 lora bf16 drop | gpt2_small 32 512 fused bf16 | gpt2_small 4 1024 foreach amp
gpt2_medium 4 1024 sgd bf16 gc | gpt2_medium 8 1024 lora amp | smollm2_135m 32 512 fused amp gc
smollm2_135m 8 1024 ada amp | smollm2_135m 4 4096 fused bf16 chunk gc | smollm2_360m 16 1024 fused bf16
smollm2_360m 8 1024 foreach amp chunk | smollm2_360m 8 2048 lora bf16 | smollm2_1.7b 2 1024 fused amp
smollm2_1.7b 4 1024 lora amp gc | qwen2.5_0.5b 8 512 foreach amp | qwen2.5_0.5b 4 2048 fused amp gc chunk
qwen2.5_0.5b 2 2048 fused amp fz16 | qwen2.5_0.5b 4 2048 lora bf16 drop | qwen2.5_1.5b 1 2048 fused amp
qwen2.5_1.5b 2 4096 lora bf16 gc | qwen2.5_1.5b 4 1024 fused bf16 fz14 | qwen2.5_3b 1 1024 fused bf16
qwen2.5_3b 2 2048 lora bf16 gc | qwen2.5_3b 1 2048 fused bf16 gc chunk | qwen2.5_7b 1 2048 lora bf16 gc
qwen3_0.6b 8 1024 fused amp gc | qwen3_0.6b 2 8192 fused bf16 gc chunk | qwen3_0.6b 4 2048 lora bf16
qwen3_1.7b 2 1024 fused amp chunk | qwen3_1.7b 4 1024 lora bf16 drop gc | qwen3_4b 1 1024 lora bf16
qwen3_4b 1 2048 fused bf16 gc chunk | llama3.2_1b 8 1024 fused amp gc | llama3.2_1b 2 2048 fused amp chunk
llama3.2_1b 8 512 foreach bf16 | llama3.2_1b 2 2048 ada amp gc | llama3.2_1b 1 8192 fused bf16 gc chunk
llama3.2_1b 2 1024 fused amp ga4 | llama3.2_1b 4 1024 fused amp fz4 | llama3.2_3b 1 2048 fused bf16 chunk
llama3.2_3b 2 2048 lora bf16 gc chunk | olmo2_1b 4 2048 fused bf16 gc | olmo2_1b 2 1024 lora bf16 drop
olmo2_7b 1 1024 lora bf16 gc | gemma3_1b 4 1024 fused bf16 gc chunk | gemma3_1b 2 2048 lora bf16 gc
gemma3_1b 1 1024 fused amp | mistral_7b 2 2048 lora bf16 gc chunk | llama3.1_8b 2 1024 lora bf16 qv
llama3.1_8b 1 4096 lora bf16 gc chunk | qwen3_8b 2 512 lora bf16 | phi4_mini_4b 2 2048 lora bf16 gc chunk
smollm3_3b 1 2048 lora bf16 | bert_base 32 256 fused amp | bert_base 8 512 foreach bf16 gc
bert_base 16 512 sgd amp fz4
llama3.2_1b 1 512 lora bf16 gc | llama3.2_1b 1 512 lora bf16 | llama3.2_1b 4 512 lora bf16 gc
llama3.2_1b 4 512 lora bf16 | llama3.2_1b 1 2048 lora bf16 gc | llama3.2_1b 1 2048 lora bf16
llama3.2_1b 4 2048 lora bf16 gc
"""


def configs(card: str = CARD) -> dict[str, TrainingConfig]:
    """Every config of the grid by its name."""
    found = {}
    for name in row_names():
        found[name] = _config(name.split("-"), card)
    return found


def is_judged(name: str) -> bool:
    """Whether the row evaluates the step time; the others fit its constants (framework/memory/roofline.py)."""
    if name in row_names(FRESH):
        return True
    names = sorted(row_names(GRID))
    random.Random(SEED).shuffle(names)
    return name in names[1::2]


def row_names(grid: str = GRID + FRESH) -> list[str]:
    """The names of all rows, in the grid's order."""
    return ["-".join(cell.split()) for line in grid.split("\n") if line for cell in line.split("|")]


def _config(cell: list[str], card: str) -> TrainingConfig:
    name, rows, tokens, *levers = cell
    model: dict[str, Any] = {"architecture": ARCHITECTURES[name]} if name in ARCHITECTURES else _model(name)
    model |= {"load_pretrained_weights": False, "model_max_length": int(tokens), "chunked_loss": False}
    training: dict[str, Any] = {"per_device_train_batch_size": int(rows), "max_steps": 1000}
    peft: dict[str, Any] = {}
    for word in levers:
        _apply(word, model, training, peft)
    return TrainingConfig(training=training, model=model, peft=peft, gpu=read_card(card))


def _model(name: str) -> dict[str, Any]:
    model = deepcopy(_preset(name))
    if name == "bert_base":
        model["architecture"]["is_decoder"] = True
    return model


@cache
def _preset(name: str) -> dict[str, Any]:
    preset: dict[str, Any] = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())["model"]
    return preset


def _apply(word: str, model: dict[str, Any], training: dict[str, Any], peft: dict[str, Any]) -> None:
    optimizers = {"fused": "adamw_torch_fused", "foreach": "adamw_torch", "sgd": "sgd", "ada": "adafactor"}
    precision = {"amp": ("float32", "bf16"), "fp32": ("float32", "none"), "bf16": ("bfloat16", "none")}
    if word in optimizers:
        training["optimizer"] = optimizers[word]
    elif word in precision:
        model["torch_dtype_str"], training["mixed_precision_dtype"] = precision[word]
    elif word == "gc":
        training["enable_gradient_checkpointing"] = True
    elif word == "chunk":
        model["chunked_loss"] = True
    elif word == "eager":
        model["attn_implementation"] = "eager"
    elif word == "lora":
        training |= {**LORA, "optimizer": "adamw_torch_fused"}
        peft |= ALL
    elif word == "drop":
        peft["lora_dropout"] = 0.05
    elif word == "qv":
        peft.pop("lora_target_modules")
    elif word.startswith("ga"):
        training["gradient_accumulation_steps"] = int(word[2:])
    else:
        block = {"bert": "layer", "gpt2": "h"}.get(model["architecture"]["model_type"], "layers")
        embedding = {"bert": "embeddings", "gpt2": "wte"}.get(model["architecture"]["model_type"], "embed_tokens")
        model["freeze_layers"] = [embedding, *(f"{block}.{index}" for index in range(int(word[2:])))]


def predict(out: Path, only: list[str]) -> None:
    chosen = {name: config for name, config in configs().items() if not only or name in only}
    with ProcessPoolExecutor(2) as pool, out.open("w") as file:
        for (name, config), plan in zip(chosen.items(), pool.map(_plan, chosen.values()), strict=True):
            row = {"name": name, "config": config.model_dump(mode="json"), "plan": plan}
            file.write(json.dumps(row) + "\n")
            file.flush()
            peak = plan.get("step_peak") or plan
            print(name, json.dumps(peak)[:160], flush=True)


def _plan(config: TrainingConfig) -> dict[str, Any]:
    from framework.run.planning.plan_pool import plan_in_subprocess

    try:
        start = time.perf_counter()
        document = plan_in_subprocess(config).to_json()
        return {**document, "planning_seconds": time.perf_counter() - start}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def measure(predicted: Path, out: Path) -> None:
    """Measure each config in its own process."""
    rows = [json.loads(line) for line in predicted.read_text().splitlines()]
    run_rows(rows, measure_row, out, [Queue((0,))], seconds=90)


def measure_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Measured figures of one card."""
    from framework.run.planning.measure import measure as measure_step

    config = TrainingConfig.model_validate_json(json.dumps(row["config"]))
    return {"measured": measure_step(config).to_json()}


FIGURES = {"allocated_bytes": (0.2, 2), "reserved_bytes": (3,), "device_bytes": (2, 4), "seconds": (10, 30)}
"""Compared figures, and the limits in percent that the goals name."""


def pair(predicted: Path, measured: Path) -> list[dict[str, Any]]:
    """One entry per row that has both: the errors in percent, and both values of every figure."""
    truth = {row["name"]: row.get("measured", row) for row in map(json.loads, measured.read_text().splitlines())}
    pairs = []
    for row in map(json.loads, predicted.read_text().splitlines()):
        found, plan = truth.get(row["name"], {}), row["plan"]
        if "error" in found or "error" in plan or not found:
            print("no pair:", row["name"], found.get("error", ""), plan.get("error", "")[:300])
            continue
        guess = {**plan["step_peak"], "seconds": (plan["step"] or {}).get("seconds", 0)}
        real = {**found, "seconds": found["step_seconds"]}
        both = {figure: {"predicted": guess[figure], "measured": real[figure]} for figure in FIGURES}
        errors = {figure: 100 * (guess[figure] / real[figure] - 1) for figure in FIGURES}
        covered = guess["device_bytes_upper"] >= real["device_bytes"]
        unknown = 100 * plan["step_peak"]["terms"]["unattributed"] / guess["device_bytes"]
        judged = is_judged(row["name"])
        pairs.append({"name": row["name"], "covered": covered, "judged": judged, "unattributed": unknown})
        pairs[-1] |= {"errors": {figure: round(error, 3) for figure, error in errors.items()}, **both}
    return pairs


def summarise(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, largest error and shares within the limits; for the step time only over the evaluation rows."""
    figures: dict[str, Any] = {}
    for figure, limits in FIGURES.items():
        rows = [row for row in pairs if row["judged"] or figure != "seconds"]
        errors = sorted(abs(row["errors"][figure]) for row in rows)
        figures[figure] = {"rows": len(errors), "median": errors[len(errors) // 2], "max": errors[-1]}
        shares = {f"within_{limit}": round(sum(e <= limit for e in errors) / len(errors), 3) for limit in limits}
        figures[figure] |= shares
    figures["upper_end_below_measured"] = sum(not row["covered"] for row in pairs)
    figures["unattributed_max"] = max(row["unattributed"] for row in pairs)
    return figures


def compare(predicted: Path, measured: Path) -> None:
    """Relative error of each figure, worst last, and the shares that the goals name."""
    pairs = pair(predicted, measured)
    for row in sorted(pairs, key=lambda row: abs(row["errors"]["allocated_bytes"])):
        print(f"{row['name']:44s}" + "".join(f"{error:+9.2f}" for error in row["errors"].values()))
    for figure, values in summarise(pairs).items():
        print(figure, values)


def summary(predicted: Path, measured: Path, out: Path) -> None:
    """The figures and rows as one JSON document, with machine, versions and date."""
    root = Path(__file__).parents[1] / "tests" / "calibration" / "h100_product_step.json"
    facts = {name: value for name, value in json.loads(root.read_text()).items() if name != "rows"}
    pairs = pair(predicted, measured)
    kept = [{name: value for name, value in row.items() if name not in ("covered", "unattributed")} for row in pairs]
    lines = ",\n".join(json.dumps(row) for row in kept)
    head = json.dumps({"machine": facts, "errors_in_per_cent": summarise(pairs)}, indent=1)[:-2]
    out.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "predict":
        predict(Path(arguments[0]), arguments[1:])
    elif verb == "measure":
        measure(Path(arguments[0]), Path(arguments[1]))
    elif verb == "summary":
        summary(Path(arguments[0]), Path(arguments[1]), Path(arguments[2]))
    else:
        compare(Path(arguments[0]), Path(arguments[1]))

"""Draw rows that judge the step time: families, sizes and settings by SEED, for benchmarks/step_times.py.

python benchmarks/step_time_rows.py plain.jsonl liger.jsonl
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.plan_grid import ARCHITECTURES

SEED = 1818
PLAIN, COMPILED, LIGER = 18, 3, 4
"""Rows of each kind."""
FAMILIES: dict[str, dict[str, Any]] = {
    name: ARCHITECTURES[name] for name in ("pythia", "granite", "starcoder2", "stablelm", "opt", "phi", "moe")
}
FAMILIES["llama"] = {
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 64000,
}
FAMILIES["qwen3"] = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
WITH_LIGER = ("llama", "qwen3", "granite")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "lion", "sgd", "adamw_8bit", "paged_adamw_8bit")


def draw(dice: random.Random, number: int, families: tuple[str, ...], **switches: Any) -> dict[str, Any]:
    """One row."""
    family = dice.choice(families)
    precision = dice.choice((("float32", "bf16"), ("bfloat16", "none"), ("bfloat16", "none"), ("float32", "none")))
    training = {
        "max_steps": 1000,
        "per_device_train_batch_size": dice.choice((1, 2, 4, 8)),
        "gradient_accumulation_steps": dice.choice((1, 1, 1, 2, 3)),
        "mixed_precision_dtype": precision[1],
        "optimizer": dice.choice(OPTIMIZERS),
        "enable_gradient_checkpointing": dice.random() < 0.4,
    }
    model = {
        "load_pretrained_weights": False,
        "architecture": FAMILIES[family],
        "torch_dtype_str": precision[0],
        "model_max_length": dice.choice((256, 512, 1024, 2048)),
    }
    config: dict[str, Any] = {"training": training, "model": model}
    if dice.random() < 0.35 and family in ("llama", "qwen3"):
        training |= {"use_peft": True, "optimizer": "adamw_torch_fused"}
        config["peft"] = {"lora_r": dice.choice((8, 16, 64)), "q_lora": dice.random() < 0.5}
    if switches.get("compile"):
        training |= {"compile": True, "enable_gradient_checkpointing": False}
    if switches.get("liger"):
        model["enable_liger_kernel"] = True
    kind = "-".join(key for key in ("compile", "liger") if switches.get(key)) or "plain"
    return {"name": f"{kind}-{number}-{family}", "config": config}


def main() -> None:
    dice = random.Random(SEED)
    print("seed", SEED)
    every = tuple(FAMILIES)
    plain = [draw(dice, number, every) for number in range(PLAIN)]
    plain += [draw(dice, number, ("llama", "qwen3", "stablelm"), compile=True) for number in range(COMPILED)]
    liger = [draw(dice, number, WITH_LIGER, liger=True) for number in range(LIGER)]
    for path, rows in zip(sys.argv[1:], (plain, liger), strict=True):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

"""Features that cost or save memory: plans compared with measured steps of a random Llama of half a billion weights.

python benchmarks/features_card.py OUT.jsonl [ROW ...] [--tiny] [--total SECONDS]     (a CUDA card; 3 minutes)

Writes a JSON line per row as it is measured: bytes and seconds of the step, planned and measured. For a row that
initializes from data (EVA) or writes samples, these are listed separately under `start` or `eval`. `--tiny` tests the
script on a CPU: small blocks, planned without a card, and two steps instead of the measurement.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.rows import Queue, run_rows
from framework import load
from framework.memory.cards import detect
from framework.run.planning.measure import assembled_at_random, measure, synthetic_batches
from framework.schema.config import TrainingConfig

STEPS = 6
BYTES = ("allocated_bytes", "reserved_bytes")
LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048}
EXPERTS = {"model_type": "qwen3_moe", "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 12}
EXPERTS |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16}
EXPERTS |= {"num_experts_per_tok": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
TINY = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4}
TOKENS = {"vocab_size": 1024}
"""Size of the tokenizer that is trained here; the vocabulary of `exact` has as many rows, that of `spare` more."""

LORA = ("training.use_peft=true", "peft.lora_r=64", "peft.lora_alpha=64", "peft.lora_target_modules=[all-linear]")
ATTENTION = ("training.use_peft=true", "peft.lora_r=16", "peft.lora_target_modules=[q_proj,v_proj]")
EMA = "training.ema_decay=0.999"
CHUNKED = "model.chunked_loss=true"
SMOOTH = ("training.label_smoothing=0.1", "training.z_loss_coef=1e-4")
DPO = ("training.task=preference", "model.model_name=FOLDER/spare", "peft.adapter_path=FOLDER/adapter", CHUNKED)
ONCE = "training.preference.precompute_reference=true"
ADDED = "model.added_tokens=['<a>','<b>']"
STACKED = "peft.lora_target_modules=[q_proj,experts.gate_up_proj,experts.down_proj]"
ROWS: dict[str, tuple[str, ...]] = {
    "full": (),
    "ema_device": (EMA,),
    "ema_host": (EMA, "training.ema_device=host"),
    "lora": LORA,
    "lora_freeze_a": (*LORA, "peft.lora_freeze_a=true"),
    "lora_gaussian": (*LORA, "peft.lora_init=gaussian"),
    "oft": ("training.use_peft=true", "peft.peft_method=oft", "peft.lora_target_modules=[q_proj,v_proj]"),
    "eva": (*ATTENTION, "peft.lora_init=eva"),
    "experts_lora": ("model.model_name=FOLDER/experts", *LORA[:2], STACKED),
    "experts_router": ("model.model_name=FOLDER/experts", "model.freeze_router=true"),
    "experts_balanced": ("model.model_name=FOLDER/experts", *LORA[:2], STACKED, "training.router_aux_loss_coef=0.01"),
    "smooth_chunked": (*SMOOTH, CHUNKED),
    "smooth_whole": (*SMOOTH, "model.chunked_loss=false"),
    "neftune": ("training.neftune_noise_alpha=5", *LORA),
    "samples": ("training.sample_prompts=[hello]", "data.eval_fraction=0.1", "training.sample_new_tokens=NEW", *LORA),
    "dpo_adapter": DPO,
    "dpo_adapter_once": (*DPO, ONCE),
    "spare_lora": (ADDED, *ATTENTION),
    "resized_lora": (ADDED, "model.model_name=FOLDER/exact", *ATTENTION),
    "resized_full": (ADDED, "model.model_name=FOLDER/exact"),
    "token_indices": (*ATTENTION, "peft.trainable_token_indices=[1,2,3]"),
    "yarn": ("model.rope_scaling={rope_type: yarn, factor: 2}", "model.model_max_length=LONGER"),
    "dynamic": ("model.rope_scaling={rope_type: dynamic, factor: 2}", "model.model_max_length=LONGER"),
    "groups": ("training.parameter_groups=[{match: embed_tokens, learning_rate: 1e-5}]",),
    "dpo_adapter_graphs": (
        *DPO,
        ONCE,
        "training.compile=true",
        "training.cuda_graphs=true",
        "data.pad_to_multiple_of=2048",
    ),
}
"""Name -> overrides, in the order in which they are measured."""


def make(row: Mapping[str, Any]) -> dict[str, Any]:
    """Configs with a tokenizer, and an adapter if needed, in the row's folder; weights are random."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from framework.build.text.tokenizer import train_tokenizer

    folder = Path(row["folder"])
    tokenizer = train_tokenizer([f"hello world {number}" for number in range(2000)], TOKENS["vocab_size"])
    exact = {**LLAMA, "vocab_size": len(tokenizer)}
    for name, shape in {"spare": LLAMA, "exact": exact, "experts": EXPERTS}.items():
        config = AutoConfig.for_model(**_sized(shape, row["tiny"]))
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    config = AutoConfig.for_model(**_sized(LLAMA, row["tiny"]))
    with no_init_weights():
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    targets = ["q_proj", "v_proj", "down_proj"]
    get_peft_model(base, LoraConfig(r=64, lora_alpha=64, target_modules=targets)).save_pretrained(folder / "adapter")
    return {"tokens": len(tokenizer)}


def _sized(shape: Mapping[str, Any], is_tiny: bool) -> dict[str, Any]:
    return {**shape, **{key: value for key, value in TINY.items() if is_tiny and key in shape}}


def config_of(row: Mapping[str, Any]) -> TrainingConfig:
    """The config of a row. Raises RequestError."""
    folder, is_tiny = Path(row["folder"]), row["tiny"]
    rows, tokens = (2, 64) if is_tiny else (4, 2048)
    overrides = ["model.model_name=FOLDER/spare", f"model.model_max_length={tokens}", f"gpu={_card(is_tiny)}"]
    overrides += [f"training.per_device_train_batch_size={rows}", "training.optimizer=adamw_torch_fused"]
    overrides += ["training.max_steps=100", "training.task=pretrain", *ROWS[row["name"]]]
    last = {override.partition("=")[0]: override for override in overrides}
    places = {"FOLDER": str(folder), "LONGER": str(4096 if not is_tiny else 128), "NEW": str(64 if not is_tiny else 8)}
    for mark, value in places.items():
        last = {key: override.replace(mark, value) for key, override in last.items()}
    recipe = folder / f"{row['name']}.yaml"
    recipe.write_text("{}\n")
    return load(recipe, list(last.values()))


def _card(is_tiny: bool) -> str:
    return (not is_tiny and detect()) or "cpu"


def plan_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the row's plan."""
    from framework.build.adapters.without_bitsandbytes import without_bitsandbytes
    from framework.run.rehearsal.rehearse import rehearse

    with without_bitsandbytes():  # as in a plan's own process
        plan = rehearse(config_of(row)).to_json()
    found = {key: plan["step_peak"][key] for key in (*BYTES, "device_bytes", "device_bytes_upper")}
    phases = {phase["name"]: phase["allocated_bytes"] for phase in plan["phases"]}
    found |= {"eval_bytes": phases.get("eval"), "start_bytes": phases.get("start")}
    return {"planned": found | {"step_seconds": plan["step"] and plan["step"]["seconds"]}}


def measure_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Measured figures of the row's step, and of work done once or at an evaluation."""
    config = config_of(row)
    found: dict[str, Any] = {}
    if not row["tiny"]:
        measured = measure(config, STEPS).to_json()
        found["measured"] = {key: measured[key] for key in (*BYTES, "device_bytes", "step_seconds", "phases")}
    extra = {"eva": _start, "samples": _samples}.get(row["name"])
    if extra is not None or row["tiny"]:
        found |= (extra or _steps)(config)
    return found


def _built(config: TrainingConfig) -> Any:
    import torch

    from framework.build.place import real_place

    torch.manual_seed(config.training.seed)
    kind = "cpu" if config.gpu.name == "cpu" else "cuda"
    return assembled_at_random(config, real_place(torch.device(kind)))


def _steps(config: TrainingConfig) -> dict[str, Any]:
    """Losses of two steps, and for a mixture of experts the share of the busiest expert."""
    from framework.run.step import reference_step, train_step

    assembly = _built(config)
    if config.training.asks_reference_once:
        reference_step(assembly, synthetic_batches(assembly)[0])
    steps = [train_step(assembly, synthetic_batches(assembly), step) for step in (1, 2)]
    return {"losses": [step.loss for step in steps], "busiest_expert": steps[-1].busiest_expert}


def _start(config: TrainingConfig) -> dict[str, Any]:
    """Initialization from data: its peak and seconds, in addition to what is allocated before it."""
    import torch

    from framework.run.record.meter import Meter
    from framework.run.setup.eva import start_from_rows

    assembly = _built(config)
    length = assembly.config.longest
    row = {"input_ids": [1 + number % 999 for number in range(length)], "labels": [1] * length}
    meter = Meter(assembly.place)
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    session = SimpleNamespace(config=assembly.config, assembly=assembly, step=0, meter=meter)
    session.inputs = SimpleNamespace(data=SimpleNamespace(train=[row] * config.batch.per_device))
    session.batches, lines = SimpleNamespace(pad_token_id=0), list[str]()
    session.progress = SimpleNamespace(say=lines.append)
    start_from_rows(session)  # type: ignore[arg-type]
    return {"start": {"held_bytes": before, "allocated_bytes": meter.phases["start"], "said": lines}}


def _samples(config: TrainingConfig) -> dict[str, Any]:
    """A sample of the longest row after three steps: its peak and seconds."""
    from framework.run.evaluate import complete
    from framework.run.record.meter import Meter
    from framework.run.step import train_step

    assembly, new_tokens = _built(config), config.training.sample_new_tokens
    for step in (1, 2, 3):
        train_step(assembly, synthetic_batches(assembly), step)
    prompt = [1 + number % 999 for number in range(max(1, assembly.config.longest - new_tokens))]
    meter, found = Meter(assembly.place), list[float]()
    meter.observe("eval")
    for _ in range(2):
        began = time.perf_counter()
        complete(assembly, prompt, min(new_tokens, assembly.config.longest - 1), 0, draws=False)
        found.append(time.perf_counter() - began)
    meter.observe("end")
    return {"eval": {"allocated_bytes": meter.phases["eval"], "seconds": found}}


def _append(out: Path, plans: Path, measured: Path) -> None:
    """Planned and measured figures of each measured row, in one line."""
    planned = {row["name"]: row for row in map(json.loads, plans.read_text().splitlines())}
    for line in measured.read_text().splitlines():
        row = json.loads(line)
        row = {**planned.get(row["name"], {}), **row}
        both = (row.get("planned") or {}, row.get("measured") or {})
        errors = {key: 100 * (both[0][key] / both[1][key] - 1) for key in both[0] if both[0][key] and both[1].get(key)}
        row["error_per_cent"] = {key: round(value, 2) for key, value in errors.items()}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row["name"], row["error_per_cent"], row.get("error", ""), row.get("start", row.get("eval", "")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="*", help="of " + ", ".join(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--total", type=float, default=190)
    asked, began = parser.parse_args(), time.monotonic()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    folder = Path(tempfile.mkdtemp(prefix="features"))
    rows = [{"name": name, "folder": str(folder), "tiny": asked.tiny} for name in asked.rows or ROWS]
    plans = asked.out.with_suffix(".plans.jsonl")
    measured = asked.out.with_suffix(".measured.jsonl")
    run_rows([{**rows[0], "name": "make"}], make, folder / "made.jsonl", [Queue((0,))], seconds=60)
    queues = [Queue((0,), threads=1)] * max(1, min(8, (os.cpu_count() or 1) // 2))
    run_rows(rows, plan_row, plans, queues, seconds=90, total=100)
    left = asked.total - (time.monotonic() - began)
    run_rows(rows, measure_row, measured, [Queue((0,))], seconds=60, total=left)
    _append(asked.out, plans, measured)


if __name__ == "__main__":
    main()

"""Savings and costs of each setting of the levers table: predicted here, measured on a card, compared.

python benchmarks/levers.py rows                                          the rows, and settings without one and why
python benchmarks/levers.py predict predicted.jsonl                       any machine; needs the packages, not the card
python benchmarks/levers.py measure predicted.jsonl measured.jsonl        a machine with the card
python benchmarks/levers.py summary predicted.jsonl measured.jsonl results/levers_h200.json

--only WORD: rows whose name contains one of the words. --skip-done: only rows missing in the output. --gpus N: on N
cards. --steps N: steps per row, 7 by default; the median of those after the second is kept, so at least 3.
Every row is one setting applied to a shape of docs/evidence/speed.md: m1 is a full fine-tune of the 1B in pure bfloat16
(4 x 2048 tokens), m2 a LoRA of the 8B (1 x 2048). It is compared with the row of its lever's first setting, measured in
the same call.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from framework.build.refuse import refuse_impossible
from framework.errors import RequestError
from framework.installation import shipped
from framework.memory.cards import read_card
from framework.memory.levers import LEVERS, Lever, Setting
from framework.memory.requirements import is_installed, suits
from framework.schema.config import TrainingConfig

CARD = "h100_80gb"
STEPS = 7
TIMEOUT = 240
SHAPES: dict[str, dict[str, Any]] = {
    "m1": {
        "model": "llama3.2_1b",
        "model.torch_dtype_str": "bfloat16",
        "training.mixed_precision_dtype": "none",
        "training.optimizer": "adamw_torch_fused",
        "training.per_device_train_batch_size": 4,
    },
    "m2": {
        "model": "llama3.1_8b",
        "model.torch_dtype_str": "bfloat16",
        "training.mixed_precision_dtype": "none",
        "training.optimizer": "adamw_torch_fused",
        "training.per_device_train_batch_size": 1,
        "training.use_peft": True,
        "peft.lora_r": 16,
        "peft.lora_alpha": 32,
        "peft.lora_target_modules": ["all-linear"],
    },
}
M2_TOO = ("checkpointing", "activation_", "training.compile", "chunked_loss", "liger", "frozen_base")
"""Parts of the keys outside `peft.` that are measured on both shapes."""
ONCE = ("peft.peft_method", "peft.lora_modules_to_save")
"""Keys of adapters that are measured only on the 1B."""
SHARDED = [lever.key for lever in LEVERS if lever.key.startswith("fsdp.")]
WITHOUT_ROW = {
    "training.per_device_eval_batch_size": "affects only evaluation, not the step",
    "training.use_peft": "m2 is the adapter; the 8B in full does not fit the card",
    "peft.peft_method=pissa": "its start takes minutes (a decomposition of each matrix); its tensors are lora's",
    "peft.peft_method=rslora": "its tensors and kernels are lora's",
    "peft.lora_plus_lr_ratio": "its tensors and kernels are lora's",
    "peft.lora_r": "adapter bytes in proportion to it",
    "peft.bnb_4bit_quant_type": "another table of 16 numbers for the same bytes",
    "model.model_max_length=512": "as 1024, in proportion",
    "training.per_device_train_batch_size=2": "between 4 and 1",
    **dict.fromkeys(SHARDED, "two cards: benchmarks/results/sharded_h200.json"),
    "data.packing": "the rows of the shapes are single documents",
    "data.padding_free": "the rows of the shapes have one length, so nothing is padded",
    "data.group_by_length": "the rows of the shapes have one length",
    "model.freeze_first_blocks": "the same as model.freeze_layers with their names",
    "m2/model.chunked_loss=256": "measured over m1",
    "m2/training.compile_scope=model": "measured over m1",
    "m2/training.activation_memory_budget=0.3": "measured over m1",
    "m2/training.gradient_checkpointing_every=4": "measured over m1",
    "m2/training.gradient_checkpointing_policy=save_matmuls": "measured over m1",
}
SMALLER = {"training.per_device_train_batch_size": 2}
FLOAT32 = {"model.torch_dtype_str": "float32", **SMALLER}
SHORT = {"model.model_max_length": 1024}
WITH: dict[str, dict[str, Any]] = {
    "model.torch_dtype_str": SMALLER,
    "training.mixed_precision_dtype": FLOAT32,
    "training.tf32": FLOAT32,
    "training.fp8": {"training.compile": True},
    "model.attn_implementation": SHORT,
    "model.sdpa_backend": SHORT,
}
"""Overrides with which every setting of a key is measured. Float32 activations, and attention scores of 2048 tokens in
all heads, would not fit the card; casts to fp8 that are not compiled cost more than they save."""


@dataclass
class Row:
    """One config to measure. `settings` are those that it represents, each with the row it is compared with."""

    name: str
    config: TrainingConfig
    settings: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Rows:
    """All rows by their config, so that none is measured twice, and reasons why some settings have none."""

    found: dict[str, Row] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, shape: str, lever: Lever, setting: Setting) -> Row | None:
        """The row of a setting on a shape; None, with the reason noted, if there can be none."""
        setting_name = f"{lever.key}={_word(setting.value)}"
        name = f"{shape}/{setting_name.partition('.')[2]}"
        reason = WITHOUT_ROW.get(setting_name) or WITHOUT_ROW.get(f"{shape}/{setting_name}")
        try:
            if reason is not None:
                raise ValueError(reason)
            if not suits(setting.hardware, TrainingConfig(gpu=read_card(CARD)).gpu):
                raise ValueError(f"needs {setting.hardware}")
            config = compose(shape, WITH.get(lever.key, {}) | dict(setting.requires) | {lever.key: setting.value})
            refuse_impossible(config, devices="any")
        except (RequestError, ValueError) as error:
            self.missing[name] = str(error)
            return None
        return self.found.setdefault(config.model_dump_json(), Row(name, config))


def rows() -> Rows:
    """Every setting of the table, on the shapes it applies to."""
    made = Rows()
    for shape in SHAPES:
        base = compose(shape, {})
        made.found[base.model_dump_json()] = Row(f"{shape}/base", base)
    for lever in LEVERS:
        for shape in _shapes(lever):
            if (reason := WITHOUT_ROW.get(lever.key)) is not None:
                made.missing[f"{shape}/{lever.key}"] = reason
                continue
            base_row = made.add(shape, lever, lever.settings[0])
            compared = base_row.name if base_row is not None else f"{shape}/base"
            for setting in lever.settings[1 if base_row is not None else 0 :]:
                if (row := made.add(shape, lever, setting)) is not None:
                    row.settings.append({"key": lever.key, "value": _word(setting.value), "base": compared})
    return made


def _shapes(lever: Lever) -> Iterator[str]:
    """Shapes of a key: adapters on the 8B, keys that change activations or matrix products on both, all others on the
    1B."""
    if lever.key.startswith("peft.") and lever.key not in ONCE:
        yield "m2"
        return
    yield "m1"
    if any(word in lever.key for word in M2_TOO):
        yield "m2"


def compose(shape: str, changes: dict[str, Any]) -> TrainingConfig:
    """A shape with some keys changed, for the card."""
    flat = {**SHAPES[shape], **changes}
    preset = yaml.safe_load((shipped("conf") / "model" / f"{flat.pop('model')}.yaml").read_text())
    tree: dict[str, Any] = {"gpu": read_card(CARD), "training": {"max_steps": 1000}, "model": preset["model"]}
    tree["model"] |= {"load_pretrained_weights": False, "model_max_length": 2048}
    if changes.get("peft.peft_method", "lora") != "lora":
        flat.pop("peft.lora_target_modules", None)
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = list(value) if isinstance(value, tuple) else value
    return TrainingConfig.model_validate(tree)


def _word(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "+".join(map(_word, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def predict(out: Path, only: list[str], skip_done: bool) -> None:
    """Write one line per row before anything is measured. A finished row has a plan for the same config."""
    chosen = [row for row in rows().found.values() if not only or any(word in row.name for word in only)]
    lines = out.read_text().splitlines() if skip_done and out.exists() else []
    done = {json.dumps(row["config"]) for row in map(json.loads, lines) if "error" not in row["plan"]}
    chosen = [row for row in chosen if json.dumps(row.config.model_dump(mode="json")) not in done]
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool, out.open("a" if skip_done else "w") as file:
        for row, plan in zip(chosen, pool.map(_plan, [row.config for row in chosen]), strict=True):
            line = {"name": row.name, "settings": row.settings, "config": row.config.model_dump(mode="json")}
            line |= {"plan": plan, "date": datetime.now(UTC).isoformat(timespec="seconds")}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(row.name, json.dumps(plan.get("step_peak") or plan)[:130], flush=True)


def _plan(config: TrainingConfig) -> dict[str, Any]:
    from framework.run.planning.plan_pool import plan_in_subprocess

    try:
        return plan_in_subprocess(config).to_json()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def measure(
    predicted: Path, out: Path, only: list[str], skip_done: bool, shard: tuple[int, int], steps: int = STEPS
) -> None:
    """Measure each row in a process forked before CUDA starts, so that imports are paid once. Lines are added as they
    come."""
    # Inductor and bitsandbytes start CUDA as they are imported, and so does torchao, which transformers imports.
    context = multiprocessing.get_context("spawn" if is_installed("torchao") else "forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama"])
    asked = [json.loads(line) for line in predicted.read_text().splitlines()]
    asked = [row for row in asked if not only or any(word in row["name"] for word in only)]
    done = _lines(out) if skip_done and out.exists() else {}
    for row in asked[shard[0] :: shard[1]]:
        if "error" not in done.get(row["name"], {"error": ""}):
            continue
        start = time.perf_counter()
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_measured, args=(row["config"], send, steps))
        child.start()
        try:
            document = receive.recv() if receive.poll(TIMEOUT) else {"error": f"no answer in {TIMEOUT} s"}
        except EOFError:
            document = {"error": "the process died"}
        child.kill()
        child.join(5)
        seconds = round(time.perf_counter() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps({"name": row["name"], "measured": document, "seconds": seconds}) + "\n")
        print(row["name"], seconds, document.get("error", ""), flush=True)


def _measured(config: dict[str, Any], send: Any, steps: int) -> None:
    """Tunesmith's own measurement, and host memory that torch's device counters do not include."""
    import psutil
    import torch

    from framework.run.planning.measure import measure as measure_step

    try:
        before = psutil.Process().memory_info().rss
        document = measure_step(TrainingConfig.model_validate_json(json.dumps(config)), steps).to_json()
        document["host_growth_bytes"] = _peak_resident() - before
        pinned = getattr(torch.cuda, "host_memory_stats", dict)()
        document["pinned_bytes"] = pinned.get("allocated_bytes.peak", pinned.get("allocated_bytes.allocated", 0))
        document["paged_bytes"] = _paged()
        document |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "packages": _packages()}
        send.send(document)
    except BaseException as error:
        send.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def _peak_resident() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _paged() -> int:
    """Bytes of bitsandbytes' paged states, which are in managed memory."""
    if "bitsandbytes" not in sys.modules:
        return 0
    from bitsandbytes.functional import GlobalPageManager

    return sum(tensor.numel() * tensor.element_size() for tensor in GlobalPageManager.get_instance().paged_tensors)


def _packages() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "torchao", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _lines(path: Path) -> dict[str, Any]:
    """Measurements by the row's name; a later success replaces a failure, never the reverse."""
    found: dict[str, Any] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "error" not in line["measured"] or line["name"] not in found:
            found[line["name"]] = line["measured"]
    return found


def summary(predicted: Path, measured: Path, out: Path) -> None:
    """Every setting with its savings and costs against its baseline, predicted and measured, and settings without a
    row.

    Rows in OUT that were not measured again stay.
    """
    before = json.loads(out.read_text()) if out.exists() else {"settings": [], "figures": [], "not_measured": {}}
    plans = {row["name"]: row for row in map(json.loads, predicted.read_text().splitlines())}
    truth = _lines(measured)
    settings, failed = [], {}
    for name, row in plans.items():
        if "error" in row["plan"] or "error" in truth.get(name, {"error": "not run"}):
            failed[name] = row["plan"].get("error") or truth.get(name, {}).get("error", "not run")
            continue
        for setting in row["settings"]:
            figures: dict[str, Any] = {**setting, "row": name}
            plain = f"{name.partition('/')[0]}/base"
            for label, base in (("against_first", setting["base"]), ("against_shape", plain)):
                is_known = "error" not in plans.get(base, {"plan": {"error": ""}})["plan"]
                is_known = is_known and "error" not in truth.get(base, {"error": ""})
                if is_known and not (label == "against_shape" and setting["key"] in WITH):
                    figures[label] = _compared((plans[base]["plan"], truth[base]), (row["plan"], truth[name]))
            settings.append(figures)
    good = {name: row for name, row in plans.items() if name not in failed}
    checked = [{"row": name, **_sides(row["plan"], truth[name])} for name, row in good.items()]
    checked = [*(row for row in before["figures"] if row["row"] not in good), *checked]
    settings = _merged(before["settings"], settings)
    known = {row["row"] for row in checked}
    failed = {name: reason for name, reason in failed.items() if name not in known}
    reasons = before.get("not_measured", {})
    unknown = {name: reasons.get(name, "not run") for name in _names() if name not in known | set(failed)}
    errors = sorted(abs(row["allocated_error_per_cent"]) for row in checked)
    some = truth[next(iter(good))]
    document = {
        "machine": some["device_name"],
        "date": some["date"],
        "packages": some["packages"],
        "shapes": SHAPES,
        "rows": len(checked),
        "allocated_error_per_cent": {"median": errors[len(errors) // 2], "max": errors[-1]},
        "within_1_per_cent": round(sum(error <= 1 for error in errors) / len(errors), 3),
        "notes": before.get("notes", []),
        "not_measured": rows().missing | failed | unknown,
    }
    head = json.dumps(document, indent=1)[:-2]
    lists = {"settings": settings, "figures": checked}
    bodies = ",\n".join(
        f' "{name}": [\n' + ",\n".join(json.dumps(item) for item in items) + "\n ]" for name, items in lists.items()
    )
    out.write_text(f"{head},\n{bodies}\n}}\n")
    print(json.dumps({name: document[name] for name in ("rows", "allocated_error_per_cent", "within_1_per_cent")}))
    for name, reason in failed.items():
        print("no figures:", name, reason[:200])


def _merged(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings of both; the later one if it was measured together with its baseline."""
    found = {(row["key"], row["value"], row["row"]): row for row in before}
    for row in now:
        place = (row["key"], row["value"], row["row"])
        if "against_first" in row or place not in found:
            found[place] = row
    return list(found.values())


def _names() -> list[str]:
    return [row.name for row in rows().found.values()]


def _compared(
    base: tuple[dict[str, Any], dict[str, Any]], row: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Bytes saved and time cost; times are per token, since some settings change the number of tokens per step."""
    plans, truths = (base[0], row[0]), (base[1], row[1])
    return {
        "saved_bytes": truths[0]["allocated_bytes"] - truths[1]["allocated_bytes"],
        "predicted_saved_bytes": plans[0]["step_peak"]["allocated_bytes"] - plans[1]["step_peak"]["allocated_bytes"],
        "saved_per_cent": round(100 * (1 - truths[1]["allocated_bytes"] / truths[0]["allocated_bytes"]), 1),
        "saved_device_bytes": truths[0]["device_bytes"] - truths[1]["device_bytes"],
        "tokens_per_second_per_cent": round(
            100 * (truths[1]["tokens_per_second"] / truths[0]["tokens_per_second"] - 1), 1
        ),
    }


def _sides(plan: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """Planned and measured figures of one row. `host_bytes` predicted is the plan's; the measured ones are three
    counters."""
    peak = plan["step_peak"]
    figures: dict[str, Any] = {}
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        figures[name] = {"predicted": peak[name], "measured": truth[name]}
    error = 100 * (peak["allocated_bytes"] / truth["allocated_bytes"] - 1)
    figures["allocated_error_per_cent"] = round(error, 3)
    host = {"predicted": plan["host_bytes"], "pinned": truth["pinned_bytes"], "growth": truth["host_growth_bytes"]}
    figures |= {
        "host_bytes": host,
        "paged_bytes": {"predicted": peak["managed_bytes"], "measured": truth["paged_bytes"]},
    }
    figures["covered"] = peak["device_bytes_upper"] >= truth["device_bytes"]
    return figures | {"step_seconds": truth["step_seconds"], "tokens_per_second": round(truth["tokens_per_second"])}


def _over_cards(arguments: argparse.Namespace) -> None:
    """Run the same command once per card, each with every n-th row."""
    if os.path.exists(arguments.files[1]) and not arguments.skip_done:
        os.remove(arguments.files[1])
    command = [sys.executable, __file__, "measure", *arguments.files, "--skip-done"]
    command += ["--only", *arguments.only] if arguments.only else []
    command += ["--steps", str(arguments.steps)]
    cards = [
        subprocess.Popen(
            [*command, "--shard", str(index), str(arguments.gpus)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(index)},
        )
        for index in range(arguments.gpus)
    ]
    for card in cards:
        card.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("rows", "predict", "measure", "summary"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--skip-done", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    files = [Path(name) for name in arguments.files]
    if arguments.verb == "rows":
        made = rows()
        for row in made.found.values():
            print(row.name, " ".join(f"[{setting['key']}, base {setting['base']}]" for setting in row.settings))
        for name, reason in made.missing.items():
            print("none:", name, "-", reason)
        print(len(made.found), "rows")
    elif arguments.verb == "predict":
        predict(files[0], arguments.only, arguments.skip_done)
    elif arguments.verb == "measure" and arguments.gpus > 1:
        _over_cards(arguments)
    elif arguments.verb == "measure":
        measure(files[0], files[1], arguments.only, arguments.skip_done, tuple(arguments.shard), arguments.steps)
    else:
        summary(*files)


if __name__ == "__main__":
    main()

"""Cache of plans in the user's cache folder. A plan depends on its config, on the rehearsed libraries and on this
package's code: the file name includes all of them, so nothing in the folder is ever out of date. A card's usable memory
is compared with a plan but does not change it, so plans are shared between limits. Loads no torch."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.installation import cache_folder, our_files, versions
from framework.memory.cards import USABLE, assumptions
from framework.memory.ledger import Plan
from framework.memory.resolve import resolve
from framework.schema.config import TrainingConfig
from framework.schema.heads import DEFAULT_CHUNK, chunks_by_default
from framework.schema.model import ModelParams
from framework.schema.objectives import TeacherParams

_LIBRARIES = (
    *("torch", "transformers", "peft", "bitsandbytes", "torchao", "triton", "liger-kernel", "accelerate"),
    *("flash-attn", "kernels", "causal-conv1d", "mamba-ssm", "flash-linear-attention"),
)
"""Packages that a rehearsal runs, or whose absence makes a model run other code."""
_NO_MATTER: Mapping[str, tuple[str, ...]] = {
    "training": (
        *("output_dir", "fallback_dir", "run_name", "seed", "trackers", "tracker_project", "logging_steps"),
        *("learning_rate", "lr_scheduler_type", "min_learning_rate", "lr_cycles", "lr_power", "lr_decay_ratio"),
        *("warmup_steps", "warmup_ratio", "early_stopping_patience"),
    ),
    "data": ("train", "mixing", "shuffle_buffer", "cache"),
}
"""Keys by section that change nothing in a plan."""


def read(config: TrainingConfig) -> Plan | None:
    """The stored plan of this config; None if there is no readable one."""
    if not _is_known(config):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return for_card(Plan.from_json(json.loads(_file(config).read_text(encoding="utf-8"))), config)
    return None


def for_card(plan: Plan, config: TrainingConfig) -> Plan:
    """A plan with the usable memory of a config's card, and the assumption about it, which may have changed since."""
    begin = f"{config.gpu.name}: {USABLE} "
    lines, current = list[str](), [line for line in assumptions(config.gpu) if line.startswith(begin)]
    for line in plan.assumptions:  # replaced in place
        if line.startswith(begin):
            lines, current = [*lines, *current], []
        else:
            lines.append(line)
    lines += current
    device = replace(plan.device, usable_bytes=config.gpu.usable_bytes)
    return replace(plan, device=device, assumptions=tuple(lines))


def write(config: TrainingConfig, plan: Plan) -> None:
    """Store a plan. If the folder cannot be written, the next plan takes time again."""
    if not _is_known(config):
        return
    with suppress(OSError):
        file = _file(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        unfinished.replace(file)


def question(config: TrainingConfig) -> str:
    """Everything in a config that its plan depends on, as JSON: equal for configs whose plans are equal, except for the
    usable memory. Derived values are filled in, as planning does."""
    with suppress(ValueError):  # the plan refuses a batch that does not divide
        config = resolve(config)
    document: dict[str, Any] = config.model_dump(mode="json")
    for section, names in _NO_MATTER.items():
        for name in names:
            document[section].pop(name)
    model, card = document["model"], document["gpu"]
    if model["chunked_loss"] is True or (model["chunked_loss"] is None and chunks_by_default(config)):
        model["chunked_loss"] = DEFAULT_CHUNK
    card["usable_bytes"] = card["usable_bytes"] is None
    card["sources"].pop("usable_bytes", None)
    return json.dumps([document, *map(_files, _models(config))], sort_keys=True)


def _file(config: TrainingConfig) -> Path:
    text = question(config) + json.dumps({**versions(_LIBRARIES), "ours": our_files()}, sort_keys=True)
    return cache_folder("plans") / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _models(config: TrainingConfig) -> Iterator[ModelParams | TeacherParams]:
    """The models that a plan covers."""
    yield config.model
    if config.training.teacher is not None:
        yield config.training.teacher


def _is_known(config: TrainingConfig) -> bool:
    """Whether everything that determines the plan is in the config or in local files: a hub's content may change."""
    return all(
        (model.architecture is not None and "model_type" in model.architecture) or _files(model)
        for model in _models(config)
    )


def _files(model: ModelParams | TeacherParams) -> list[tuple[str, int, int]]:
    """Name, size and time of change (ns) of each file of a model that is a folder."""
    folder = Path(model.model_name or "").expanduser()
    if not model.model_name or not folder.is_dir():
        return []
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return [(name, facts.st_size, facts.st_mtime_ns) for name, facts in files]

"""Cache of plans in the user's cache folder. A plan depends on its config, on the rehearsed libraries and on this
package's code: the file name includes all of them, so nothing in the folder is ever out of date. A card's usable memory
is compared with a plan but does not change it, so plans are shared between limits. Loads no torch."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.installation import cache_folder, our_files, versions
from framework.memory.cards import USABLE, assumptions
from framework.memory.ledger import Plan
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.objectives import TeacherParams

_LIBRARIES = (
    *("torch", "transformers", "peft", "bitsandbytes", "torchao", "triton", "liger-kernel", "accelerate"),
    *("flash-attn", "kernels", "causal-conv1d", "mamba-ssm", "flash-linear-attention"),
)
"""Packages that a rehearsal runs, or whose absence makes a model run other code."""
_NO_MATTER = (
    *(("training", name) for name in ("output_dir", "fallback_dir", "run_name", "seed", "learning_rate", "trackers")),
    ("data", "train"),
)


def read(config: TrainingConfig) -> Plan | None:
    """The stored plan of this config; None if there is no readable one."""
    if not _is_known(config):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        # The card's usable memory, and the assumption about it, may have changed since.
        plan = Plan.from_json(json.loads(_file(config).read_text(encoding="utf-8")))
        begin = f"{config.gpu.name}: {USABLE} "
        lines = [line for line in plan.assumptions if not line.startswith(begin)]
        lines += [line for line in assumptions(config.gpu) if line.startswith(begin)]
        device = replace(plan.device, usable_bytes=config.gpu.usable_bytes)
        return replace(plan, device=device, assumptions=tuple(lines))
    return None


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


def _file(config: TrainingConfig) -> Path:
    document: dict[str, Any] = config.model_dump(mode="json")
    for section, name in _NO_MATTER:
        document[section].pop(name)
    card = document["gpu"]
    card["usable_bytes"] = card["usable_bytes"] is None
    card["sources"].pop("usable_bytes", None)
    made_with = {**versions(_LIBRARIES), "ours": our_files()}
    text = json.dumps([document, *map(_files, _models(config)), made_with], sort_keys=True)
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

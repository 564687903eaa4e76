"""Folders of runs and adapters: where the trained model is, what to write for it, and trust in remote code.

Only a recipe or the command line may allow Python code that comes with a model, never a run's files: a run folder may
come from anyone, and using one (`check`, `predict`, another `train`) is no consent to its code."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from pathlib import Path as File
from typing import Any

from framework.compose.origins import Origin
from framework.errors import Problem
from framework.paths import read_regular
from framework.schema.config import TrainingConfig

FINAL, ADAPTER_FILE, MODEL_FILE, RUN_FILE = "final", "adapter_config.json", "config.json", "config.yaml"


def trained_folder(folder: Path) -> Path:
    """`final/` of a run's folder if it holds a model or adapter, else the folder itself."""
    final = folder / FINAL
    is_trained = (final / ADAPTER_FILE).exists() or (final / MODEL_FILE).exists()
    return final if is_trained and not holds_model(folder) else folder


def holds_model(folder: Path) -> bool:
    """Whether the folder itself holds a model or an adapter."""
    return (folder / ADAPTER_FILE).exists() or (folder / MODEL_FILE).exists()


def describe_trained(folder: Path) -> tuple[str, str] | None:
    """Description of a folder without a loadable model, and what to write instead; None for unknown folders.

    Recognizes a run's folder, its checkpoints, and an adapter's folder.
    """
    found = trained_folder(folder)
    if (found / ADAPTER_FILE).exists():
        base = (read_json(found / ADAPTER_FILE) or {}).get("base_model_name_or_path")
        model = f"model.model_name={base}" if base else "the model it was trained on as model.model_name"
        merge = f"`tunesmith merge {folder} --output MERGED` makes one model of both"
        message = f"{folder} holds an adapter of {base or 'an unnamed base'}, not a model"
        return message, f"peft.adapter_path={found} with {model}; {merge}"
    if found != folder:
        return f"{folder} is a run's folder; its trained model is in {FINAL}/", str(found)
    run = next((place for place in (folder, *folder.parents[:2]) if (place / RUN_FILE).exists()), None)
    if run is None:
        return None
    resume = f"`tunesmith train {run / RUN_FILE} --resume` continues it"
    if run == folder:
        return f"{folder} is a run that has not finished: it has no {FINAL}/", resume
    holds = "holds a checkpoint for a resume, not a model that loads elsewhere"
    trained = describe_trained(run) if holds_model(run / FINAL) else None
    return f"{folder} {holds}", f"{trained[1]}; or {resume}" if trained else resume


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it cannot be read."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


MODEL, TEACHER = "model.trust_remote_code", "training.teacher.trust_remote_code"
_CONFIG = "config.yaml"
_OTHERS = ("plan.json", "metrics.jsonl", "environment.json", "memory.json", "checkpoints", "final")
"""Files of a run: a folder with a config and any of these is a run's."""


def trusted_keys(config: TrainingConfig) -> list[str]:
    """Keys of the config that allow a model's own code."""
    teacher = config.training.teacher
    trusts = {MODEL: config.model.trust_remote_code, TEACHER: teacher is not None and teacher.trust_remote_code}
    return [key for key, is_set in trusts.items() if is_set]


def refuse_trust_of_runs(config: TrainingConfig, recipe: File, origins: Mapping[str, Origin]) -> list[Problem]:
    """A problem for each permission that comes from a run's file, or from a preset chosen by one."""
    return [
        untrusted(key, origins[key].place, f"`{key}=true` on the command line, if you trust that code")
        for key in trusted_keys(config)
        if origins[key].kind in ("recipe", "group") and (is_of_run(recipe) or is_of_run(_file(origins[key])))
    ]


def untrusted(key: str, where: str, expected: str) -> Problem:
    """Problem for a permission in a run's config."""
    message = "a run's config cannot allow the Python code that comes with a model"
    return Problem(key, message, where, expected)


def without_trust(config: TrainingConfig) -> TrainingConfig:
    """The config without these permissions."""
    teacher = config.training.teacher and config.training.teacher.model_copy(update={"trust_remote_code": False})
    training = config.training.model_copy(update={"teacher": teacher})
    model = config.model.model_copy(update={"trust_remote_code": False})
    return config.model_copy(update={"model": model, "training": training})


def is_of_run(file: File) -> bool:
    """Whether a file is inside a run's folder, by its path or after resolving links."""
    folders = (folder for path in (File(os.path.abspath(file)), file.resolve()) for folder in path.parents)
    return any((folder / _CONFIG).exists() and any((folder / name).exists() for name in _OTHERS) for folder in folders)


def _file(origin: Origin) -> File:
    return File(os.path.expanduser(origin.where.rpartition(":")[0]))

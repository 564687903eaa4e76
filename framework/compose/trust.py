"""The leave to run Python code that comes with a model: a recipe or the command line gives it, a run's files never do.

A run folder may come from anyone, and to look at one (`check`, `predict`, another `train`) is no consent to its code.
"""

import os
from collections.abc import Mapping
from pathlib import Path as File

from framework.compose.origins import Origin
from framework.errors import Problem
from framework.schema.config import TrainingConfig

MODEL, TEACHER = "model.trust_remote_code", "training.teacher.trust_remote_code"
_CONFIG = "config.yaml"
_OTHERS = ("plan.json", "metrics.jsonl", "environment.json", "memory.json", "checkpoints", "final")
"""A folder with a config and any of these is a run's."""


def trusted_keys(config: TrainingConfig) -> list[str]:
    """The keys by which a config has a model's own code run."""
    teacher = config.training.teacher
    trusts = {MODEL: config.model.trust_remote_code, TEACHER: teacher is not None and teacher.trust_remote_code}
    return [key for key, is_set in trusts.items() if is_set]


def refuse_trust_of_runs(config: TrainingConfig, recipe: File, origins: Mapping[str, Origin]) -> list[Problem]:
    """A problem for each leave that comes from a file of a run, or from a preset that such a file chooses."""
    return [
        untrusted(key, origins[key].place, f"`{key}=true` on the command line, if you trust that code")
        for key in trusted_keys(config)
        if origins[key].kind in ("recipe", "group") and (is_of_run(recipe) or is_of_run(_file(origins[key])))
    ]


def untrusted(key: str, where: str, expected: str) -> Problem:
    """What is wrong with a leave that is written in a run's config."""
    message = "a run's config gives no leave to run the Python code that comes with a model"
    return Problem(key, message, where, expected)


def without_trust(config: TrainingConfig) -> TrainingConfig:
    """The config with no leave in it."""
    teacher = config.training.teacher and config.training.teacher.model_copy(update={"trust_remote_code": False})
    training = config.training.model_copy(update={"teacher": teacher})
    model = config.model.model_copy(update={"trust_remote_code": False})
    return config.model_copy(update={"model": model, "training": training})


def is_of_run(file: File) -> bool:
    """Whether a file is in the folder of a run or somewhere below one, as it is named or where its links lead."""
    folders = (folder for path in (File(os.path.abspath(file)), file.resolve()) for folder in path.parents)
    return any((folder / _CONFIG).exists() and any((folder / name).exists() for name in _OTHERS) for folder in folders)


def _file(origin: Origin) -> File:
    return File(os.path.expanduser(origin.where.rpartition(":")[0]))

"""Configs made from settings of the levers table."""

from typing import Any

from framework.memory.levers import Setting
from framework.schema.config import TrainingConfig


def sections(*chosen: tuple[str, Setting]) -> dict[str, dict[str, Any]]:
    """The settings as a tree, each with the keys that it needs in addition; chosen values override those."""
    flat: dict[str, Any] = {}
    for _, setting in chosen:
        flat |= setting.requires
    flat |= {key: setting.value for key, setting in chosen}
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return tree


def as_config(key: str, setting: Setting) -> TrainingConfig:
    """One setting over the defaults."""
    return TrainingConfig.model_validate(sections((key, setting)))

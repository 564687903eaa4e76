"""A config with other values. No torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from framework.memory.requirements import unmet_requirements
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.rules.every import Needs, find_conflicts


def default_of(key: str) -> Any:
    """What a dotted key holds where nobody writes it."""
    return value_of(TrainingConfig(), key)


def with_values(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """The config with other values of dotted keys, typed again. Raises pydantic's ValidationError."""
    document = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section[part]
        section[name] = value
    return TrainingConfig.model_validate(document)


def possible(config: TrainingConfig, changes: Mapping[str, Any], runs_here: bool = True) -> TrainingConfig | None:
    """The config with other values; None where they contradict it, its card, or this machine."""
    try:
        changed = with_values(config, changes)
    except ValidationError:
        return None
    conflicts = (*find_conflicts(changed, Needs()), *unmet_requirements(changed, runs_here))
    refused = any(not conflict.is_warning for conflict in conflicts)
    return None if refused else changed

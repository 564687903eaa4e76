"""Metric trackers in addition to `metrics.jsonl`: whether they are installed, and a config as they take it."""

from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.requirements import missing_trackers
from framework.schema.config import TrainingConfig


def check_trackers(config: TrainingConfig) -> None:
    """Raises RequestError naming every tracker whose package is not installed."""
    missing = list(missing_trackers(config))
    if missing:
        raise RequestError([Problem(found.keys[0], found.message, expected=found.expected) for found in missing])


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and plain values, as every tracker takes them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flattened(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, int | float | str | bool) else str(value)
    return found

"""Metric trackers besides `metrics.jsonl`: whether they are installed, and a config as they take it."""

import importlib.util
from typing import Any

from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig


def check_trackers(config: TrainingConfig) -> None:
    """Raises RequestError naming every tracker whose package is not installed."""
    problems = [
        Problem(
            f"training.trackers[{index}]", f"the package {tracker} is not installed", expected=f"pip install {tracker}"
        )
        for index, tracker in enumerate(config.training.trackers)
        if importlib.util.find_spec(str(tracker)) is None
    ]
    if problems:
        raise RequestError(problems)


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

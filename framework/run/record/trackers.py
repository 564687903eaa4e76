"""Metric trackers besides `metrics.jsonl`. One that fails while a run goes on is left out, and the run is not ended."""

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from framework.errors import Problem, RequestError
from framework.run.record.run_folder import TENSORBOARD, RunFolder
from framework.schema.choices import Tracker
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


class Trackers:
    """The trackers of a run, started. `say` is told of one that fails."""

    def __init__(self, config: TrainingConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say, self._started = say, dict[str, Any]()
        if not folder.is_written:
            return
        from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker

        project = config.training.run_name or folder.path.name
        values = _flattened(config.model_dump(mode="json"))
        for name in map(str, config.training.trackers):
            if name == Tracker.TENSORBOARD:  # which makes a folder of its name
                tracker = TensorBoardTracker(TENSORBOARD, folder.path)
            else:
                tracker = (WandBTracker if name == Tracker.WANDB else MLflowTracker)(project)
            tracker.start()
            tracker.store_init_configuration(values)
            self._started[name] = tracker

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """The figures of a step; those that are None are left out."""
        known = {name: value for name, value in values.items() if value is not None}
        for name, tracker in [*self._started.items()]:
            try:
                tracker.log(known, step=step)
            except Exception as error:  # a full disk, a server that is gone: of any kind
                del self._started[name]
                self._say(f"warning   {name} is left out from step {step} on: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let them write what they have."""
        for tracker in self._started.values():
            with contextlib.suppress(Exception):
                tracker.finish()


def _flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and plain values, as every tracker takes them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flattened(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, int | float | str | bool) else str(value)
    return found

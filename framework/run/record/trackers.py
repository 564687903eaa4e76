"""Logging of a run's metrics to `metrics.jsonl` and trackers. A failing tracker is dropped, and the run continues."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.requirements import missing_trackers
from framework.run.record.metrics_log import MetricsLog
from framework.run.record.run_folder import TENSORBOARD, RunFolder
from framework.schema.choices import Tracker
from framework.schema.config import TrainingConfig

_NAME_OF_RUN = {
    Tracker.WANDB: "name",
    Tracker.MLFLOW: "run_name",
    Tracker.SWANLAB: "experiment_name",
    Tracker.TRACKIO: "name",
}
"""Argument for the run's name at each tracker's start; Comet's is set afterwards, TensorBoard has none."""
_TAKE_TEXT = (Tracker.TENSORBOARD, Tracker.WANDB, Tracker.COMET_ML)
"""Trackers of accelerate that log plain texts."""


def check_trackers(config: TrainingConfig) -> None:
    """Raise RequestError naming every tracker whose package is not installed."""
    problems = [Problem(each.keys[0], each.message, expected=each.expected) for each in missing_trackers(config)]
    if problems:
        raise RequestError(problems)


class Trackers:
    """Started trackers of a run. `say` receives a warning for one that fails later. Raises RequestError for one that
    does not start, for example because its server does not answer or nobody is logged in."""

    def __init__(self, config: TrainingConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say, self._started = say, dict[Tracker, Any]()
        if not folder.is_written:
            return
        values = _flattened(config.model_dump(mode="json"))
        for index, name in enumerate(config.training.trackers):
            try:
                self._started[name] = _started(name, config, folder)
                self._started[name].store_init_configuration(values)
            except Exception as error:  # of any kind
                self.close()
                message = f"{name} cannot be started: {type(error).__name__}: {error}"
                expected = "an account that is logged in, a server that answers, or no such tracker"
                raise RequestError([Problem(f"training.trackers[{index}]", message, expected=expected)]) from error

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log the metrics of a step or an evaluation, except those that are None."""
        known = {name: value for name, value in values.items() if value is not None}
        self._send(known, step, tuple(self._started))

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Log texts to the trackers that support them."""
        self._send(texts, step, _TAKE_TEXT)

    def _send(self, values: Mapping[str, Any], step: int, names: tuple[Tracker, ...]) -> None:
        for name, tracker in [*self._started.items()]:
            if name not in names:
                continue
            try:
                tracker.log(dict(values), step=step)
            except Exception as error:  # a full disk, a server that is gone: of any kind
                del self._started[name]
                self._say(f"warning   {name} is dropped from step {step} on: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Flush and close all trackers."""
        for tracker in self._started.values():
            with contextlib.suppress(Exception):
                tracker.finish()


class RunLog(Trackers):
    """Logs to `metrics.jsonl` of the run folder, then to the trackers."""

    def __init__(self, config: TrainingConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        super().__init__(config, folder, say)
        self._folder, self._metrics = folder, MetricsLog(folder.path, say) if folder.is_written else None

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log the metrics of a step or an evaluation."""
        if self._metrics is not None:
            self._metrics.append(values)
        super().log(values, step)

    def close(self) -> None:
        """Flush and close everything."""
        super().close()
        if self._metrics is not None:
            self._metrics.close(self._folder.fallback)


def _started(name: Tracker, config: TrainingConfig, folder: RunFolder) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[str(name)]
    run = config.training.run_name or folder.path.name
    if name is Tracker.TENSORBOARD:  # which makes a folder of its name
        tracker = kind(TENSORBOARD, folder.path)
    else:
        named = {_NAME_OF_RUN[name]: run} if name in _NAME_OF_RUN else {}
        tracker = kind(config.training.tracker_project or run, **named)
    tracker.start()
    if name is Tracker.COMET_ML:
        tracker.tracker.set_name(run)
    return tracker


def _flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and plain values, which every tracker accepts."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flattened(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, int | float | str | bool) else str(value)
    return found

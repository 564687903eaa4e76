"""The best evaluation of a run so far: which checkpoint to keep, and when to stop early."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import Problem, RequestError
from framework.schema.evaluation import LOWER_IS_BETTER
from framework.schema.training import TrainingParams

FILE = "best.json"
"""File of a run folder that names its best checkpoint and the metric."""


@dataclass
class Best:
    """The best of the evaluations after a step that changed weights. `step` is None before the first."""

    metric: str
    patience: int | None
    is_kept: bool
    """Whether its checkpoint is kept (`training.best_metric`), or it serves early stopping only."""
    step: int | None = None
    value: float = 0.0
    since: int = 0
    """Number of evaluations since, none of which was better."""

    @classmethod
    def of(cls, training: TrainingParams, saved: Mapping[str, Any] | None) -> "Best":
        """Start as a config asks, from the state that a checkpoint has `saved` if it is for the same metric."""
        metric = training.best_metric or "eval_loss"
        best = cls(metric, training.early_stopping_patience, training.best_metric is not None)
        if saved and saved["metric"] == metric:
            best.step, best.value, best.since = saved["step"], saved["value"], saved["since"]
        return best

    def take(self, step: int, values: Mapping[str, float]) -> bool:
        """Record the evaluation after `step`. Returns whether it is the best so far, which NaN never is. Raises
        RequestError if it lacks the metric."""
        if self.metric not in values:
            message = f"the evaluation has no {self.metric}"
            raise RequestError([Problem("training.best_metric", message, expected=f"one of {', '.join(values)}")])
        value = values[self.metric]
        lower = self.metric.partition("/")[0] in LOWER_IS_BETTER
        if (self.step is None and value == value) or (value < self.value if lower else value > self.value):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    @property
    def ends_run(self) -> bool:
        """Whether early stopping is due: as many evaluations as `patience` allows were no better."""
        return self.patience is not None and self.since >= self.patience

    def to_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint and for `best.json`."""
        return {"metric": self.metric, "step": self.step, "value": self.value, "since": self.since}

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f} after step {self.step}"

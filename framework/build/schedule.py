"""The learning rate as a function of the optimizer step. Nothing here counts processes or micro batches."""

import math
from dataclasses import dataclass

from framework.schema.choices import Scheduler
from framework.schema.training import TrainingParams
from framework.schema.wording import counted


@dataclass(frozen=True)
class Schedule:
    """Rate of each optimizer step 1..total: linear warm-up to `peak`, reached at step `warmup`, then the shape.

    No step has rate zero: the shape falls towards `floor` and would reach it one step after the last.
    """

    shape: Scheduler
    peak: float
    floor: float
    warmup: int
    total: int

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        progress = min(1.0, (step - 1 - self.warmup) / max(1, self.total - self.warmup))
        if self.shape is Scheduler.CONSTANT:
            return self.peak
        if self.shape is Scheduler.LINEAR:
            return self.peak * (1 - progress)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def __str__(self) -> str:
        rates = f"first {self.rate(1):.3g}, peak {self.peak:.3g}, last {self.rate(self.total):.3g}"
        return f"{self.shape} over {counted(self.total, 'step')}, {self.warmup} of warm-up; rate {rates}"


def build_schedule(training: TrainingParams, total: int) -> Schedule:
    """The schedule of a run of `total` optimizer steps."""
    warmup = training.warmup_steps
    if warmup is None:
        warmup = math.ceil(training.warmup_ratio * total)
    floor = training.min_learning_rate if training.lr_scheduler_type is Scheduler.COSINE_WITH_MIN_LR else 0.0
    return Schedule(training.lr_scheduler_type, training.learning_rate, floor, min(warmup, total), total)

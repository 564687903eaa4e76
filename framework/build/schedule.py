"""The learning-rate schedule: a function of the optimizer step alone, independent of processes and micro-batches.

The shapes are those of `transformers.get_scheduler`, with the same names.
"""

import math
from dataclasses import dataclass

from framework.schema.choices import Scheduler
from framework.schema.plural import counted
from framework.schema.training import TrainingParams

INVERSE_SQRT_TIMESCALE = 10_000
"""Steps in which `inverse_sqrt` falls to 1/sqrt(2) without warm-up (transformers' default); with warm-up its length is
used."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each optimizer step 1..total: linear warm-up to `peak`, reached at step `warmup`, then the
    shape.

    No step has rate zero: the shape falls towards `floor` and would reach it one step after the last.
    """

    shape: Scheduler
    peak: float
    floor: float
    warmup: int
    total: int
    cycles: int = 1
    power: float = 1.0
    decay: int = 0
    """Number of last steps in which `warmup_stable_decay` falls."""

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        return self.floor + (self.peak - self.floor) * self._height(step - 1 - self.warmup)

    def _height(self, after: int) -> float:
        """Height between floor (0) and peak (1), `after` steps after warm-up."""
        rest = max(1, self.total - self.warmup)
        progress = min(1.0, after / rest)
        match self.shape:
            case Scheduler.CONSTANT:
                return 1.0
            case Scheduler.LINEAR:
                return 1 - progress
            case Scheduler.POLYNOMIAL:
                return float((1 - progress) ** self.power)
            case Scheduler.INVERSE_SQRT:
                return float((1 + after / (self.warmup or INVERSE_SQRT_TIMESCALE)) ** -0.5)
            case Scheduler.WARMUP_STABLE_DECAY:
                return _cosine(max(0.0, (after - (rest - self.decay)) / self.decay))
            case Scheduler.COSINE_WITH_RESTARTS:
                return _cosine(self.cycles * progress % 1.0)
            case Scheduler.COSINE | Scheduler.COSINE_WITH_MIN_LR:
                return _cosine(progress)

    def __str__(self) -> str:
        rates = f"first {self.rate(1):.3g}, peak {self.peak:.3g}, last {self.rate(self.total):.3g}"
        falls = f", falls in the last {self.decay}" if self.decay else ""
        return f"{self.shape} over {counted(self.total, 'step')}, {self.warmup} of warm-up{falls}; rate {rates}"


def build_schedule(training: TrainingParams, total: int) -> Schedule:
    """The schedule of a run of `total` optimizer steps."""
    warmup = training.warmup_steps
    if warmup is None:
        warmup = math.ceil(training.warmup_ratio * total)
    warmup, shape = min(warmup, total), training.lr_scheduler_type
    decay = min(math.ceil(training.lr_decay_ratio * total), max(1, total - warmup))
    return Schedule(
        shape,
        training.learning_rate,
        training.min_learning_rate if shape in WITH_FLOOR else 0.0,
        warmup,
        total,
        training.lr_cycles,
        training.lr_power,
        decay if shape is Scheduler.WARMUP_STABLE_DECAY else 0,
    )


WITH_FLOOR = (Scheduler.COSINE_WITH_MIN_LR, Scheduler.POLYNOMIAL, Scheduler.WARMUP_STABLE_DECAY)
"""Shapes that end at `min_learning_rate`."""


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))

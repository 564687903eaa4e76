"""Rules of checkpoints: those written asynchronously (`training.async_save`), and the best one."""

from collections.abc import Iterator
from difflib import get_close_matches

from framework.schema.config import TrainingConfig
from framework.schema.intervals import steps_between
from framework.schema.metrics import METRICS
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict

_KEY, _STEPS = "training.async_save", "training.save_steps"


def save_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Next to the last save there is nothing left to train."""
    training = config.training
    if not training.async_save:
        return
    if training.save_steps is None:
        yield Conflict((_KEY, _STEPS), "has no effect: the only save is at the end", "training.save_steps=100")
    elif training.max_steps is not None:
        yield from last_save_conflicts(config, training.max_steps)


def best_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """The best of several evaluations needs evaluations."""
    training = config.training
    asked = [
        f"training.{name}"
        for name in ("best_metric", "early_stopping_patience", "export_best")
        if getattr(training, name)
    ]
    if asked and training.eval_steps is None:
        yield Conflict((asked[0], "training.eval_steps"), "needs evaluations to compare", "training.eval_steps=epoch")
    known = METRICS[training.task]
    if training.best_metric is not None and training.best_metric not in known:
        close = get_close_matches(training.best_metric, known, 1)
        message = f"an evaluation of {training.task} has no {training.best_metric}"
        yield Conflict(("training.best_metric", "training.task"), message, close[0] if close else ", ".join(known))
    if training.export_best and training.best_metric is None:
        keys = ("training.export_best", "training.best_metric")
        yield Conflict(keys, "does not say which is the best", "training.best_metric=eval_loss")


def last_save_conflicts(config: TrainingConfig, total: int) -> Iterator[Conflict]:
    """The same, of a run whose steps are known."""
    training = config.training
    steps = steps_between(training.save_steps, total)
    if training.async_save and steps is not None and steps >= total:
        message = f"has no effect: the only save is at the end, after {counted(total, 'step')}"
        fewer = f"training.save_steps={total // 2}, or async_save: false" if total > 1 else "training.async_save: false"
        yield Conflict((_KEY, _STEPS), message, fewer)

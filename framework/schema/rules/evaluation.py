"""Rules of evaluations: the best of them, and samples written at each."""

from collections.abc import Iterator
from difflib import get_close_matches

from framework.schema.config import TrainingConfig
from framework.schema.metrics import METRICS
from framework.schema.rules.conflict import Conflict


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


def sample_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Samples are written at evaluations, by one device that has the whole model."""
    training, data, key = config.training, config.data, "training.sample_prompts"
    if not training.sample_prompts:
        return
    if not data.eval and not data.eval_fraction:
        message = "is for evaluations, and there is no data for them"
        yield Conflict((key, "data.eval", "data.eval_fraction"), message, "data.eval or data.eval_fraction")
    if config.gpu.count > 1 and not (config.is_replicated and config.sharing == 1):
        message = "a completion would gather every split weight for each of its tokens"
        yield Conflict((key, "gpu.count"), message, "no prompts, or `tunesmith predict` afterwards")

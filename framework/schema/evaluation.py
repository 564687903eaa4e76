"""Evaluations and checkpoints: the distance between them, and by which metrics they are compared."""

import math
from typing import Annotated, Literal

from pydantic import Field

from framework.schema.choices import Task
from framework.schema.params import Integer, Number

Epoch = Literal["epoch"]
Interval = Annotated[Integer, Field(ge=1)] | Annotated[Number, Field(gt=0, lt=1)] | Epoch


def steps_between(interval: Interval | None, total: int) -> int | None:
    """Optimizer steps of an interval in a run of `total`; a share is rounded up, as in transformers. None where there
    is no interval, or it is an epoch, which depends on the rows."""
    if interval is None or isinstance(interval, str):
        return None
    return int(interval) if interval >= 1 else max(1, math.ceil(interval * total))


def is_due(interval: Interval | None, step: int, total: int, epochs: tuple[float, float]) -> bool:
    """Whether optimizer step `step` (from 1) of `total` ends an interval. `epochs`: how many had gone by before the
    step and after it."""
    if interval == "epoch":
        return math.floor(epochs[1] + _ROUNDING) > math.floor(epochs[0] + _ROUNDING)
    steps = steps_between(interval, total)
    return steps is not None and step % steps == 0


_ROUNDING = 1e-9
"""Epochs are a quotient of whole steps, which may fall short of a whole number by its last bits."""


FROM_PYTHON = "python/"
"""Before the names of metrics that a program hands over."""
LOWER_IS_BETTER = frozenset({"eval_loss", "perplexity", "router_loss", "divergence", "mse", "mae"})
"""Of all others more is better."""

METRICS = {
    Task.SFT: ("eval_loss", "perplexity", "token_accuracy", "router_loss"),
    Task.PRETRAIN: ("eval_loss", "perplexity", "token_accuracy", "router_loss"),
    Task.PREFERENCE: ("eval_loss", "reward_accuracy", "reward_margin"),
    Task.REWARD: ("eval_loss", "reward_accuracy", "reward_margin"),
    Task.CLASSIFICATION: ("eval_loss", "accuracy", "macro_f1", "micro_f1"),
    Task.REGRESSION: ("eval_loss", "mse", "mae", "r2", "pearson"),
    Task.DISTILLATION: ("eval_loss", "divergence", "perplexity", "token_accuracy"),
}
"""Those by which the best checkpoint can be chosen. `router_loss` is there with a router loss, `micro_f1` where a row
has several classes, `reward_accuracy` where answers come in pairs."""

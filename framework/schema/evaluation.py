"""Intervals of evaluations and checkpoints, and which metrics are better if lower."""

import math
from typing import Annotated, Literal

from pydantic import Field

from framework.schema.params import Integer, Number

Epoch = Literal["epoch"]
Interval = Annotated[Integer, Field(ge=1)] | Annotated[Number, Field(gt=0, lt=1)] | Epoch


def steps_between(interval: Interval | None, total: int) -> int | None:
    """Optimizer steps of an interval in a run of `total`; a share is rounded up, as in transformers. None for no
    interval, and for an epoch, which depends on the rows."""
    if interval is None or isinstance(interval, str):
        return None
    return int(interval) if interval >= 1 else max(1, math.ceil(interval * total))


def is_due(interval: Interval | None, step: int, total: int, epochs: tuple[float, float]) -> bool:
    """Whether optimizer step `step` (from 1) of `total` ends an interval. `epochs`: completed before and after the
    step."""
    if interval == "epoch":
        return math.floor(epochs[1] + _ROUNDING) > math.floor(epochs[0] + _ROUNDING)
    steps = steps_between(interval, total)
    return steps is not None and step % steps == 0


_ROUNDING = 1e-9
"""Tolerance for epochs, a quotient of steps that may be slightly below an integer."""


FROM_PYTHON = "python/"
"""Prefix of metrics passed by a Python program."""
LOWER_IS_BETTER = frozenset({"eval_loss", "perplexity", "router_loss", "divergence", "mse", "mae"})
"""For all others higher is better."""

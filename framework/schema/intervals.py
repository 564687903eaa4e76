"""Distances between evaluations or checkpoints: optimizer steps, a share of the run, or an epoch."""

import math
from typing import Annotated, Literal

from pydantic import Field

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

"""The averaged weights that are evaluated and exported: a schedule-free optimizer's, or `training.ema_decay`'s."""

import contextlib
from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.optimizers.schedule_free import take_schedule_free_average
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.ranks import local_part
from framework.schema.optimizers import Optimizer


def is_averaged(assembly: Assembly) -> bool:
    """Whether other weights are evaluated and exported than those that are trained."""
    training = assembly.config.training
    is_followed = training.ema_decay is not None and training.export_ema
    return is_followed or training.optimizer is Optimizer.SCHEDULE_FREE_ADAMW


@torch.no_grad()
def take_average(assembly: Assembly) -> None:
    """Put the averaged weights in the model for good. Nothing happens where there are none."""
    if not is_averaged(assembly):
        return
    take_schedule_free_average(assembly.optimizer)
    for parameter in assembly.trained:
        average = assembly.optimizer.state.get(parameter, {}).get(AVERAGE)
        if average is not None:
            local_part(parameter.detach()).copy_(local_part(average))


@contextlib.contextmanager
def averaged(assembly: Assembly) -> Iterator[None]:
    """Within the block the model holds the averaged weights; afterwards, bit for bit, those it trains.

    The copy kept meanwhile takes the room that the gradients leave free between two steps; a rehearsal, whose first
    evaluation comes before any average, has it too.
    """
    has_average = is_averaged(assembly) and (assembly.place.rehearsed or any(assembly.optimizer.state.values()))
    held = [local_part(parameter.detach()) for parameter in assembly.trained] if has_average else []
    trained = [weights.clone() for weights in held]
    try:
        take_average(assembly)
        yield
    finally:
        for weights, before in zip(held, trained, strict=True):
            weights.copy_(before)

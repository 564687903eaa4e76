"""Averaged weights for evaluation and export: those of a schedule-free optimizer, or of `training.ema_decay`."""

import contextlib
from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.optimizers.schedule_free import take_schedule_free_average
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.ranks import local_part


@torch.no_grad()
def take_average(assembly: Assembly) -> None:
    """Replace the model's weights by the averaged ones for good; without an average do nothing."""
    if not assembly.config.training.exports_average:
        return
    take_schedule_free_average(assembly.optimizer)
    for parameter in assembly.trained:
        average = assembly.optimizer.state.get(parameter, {}).get(AVERAGE)
        if average is not None:
            local_part(parameter.detach()).copy_(local_part(average))


@contextlib.contextmanager
def averaged(assembly: Assembly) -> Iterator[None]:
    """Within the block the model holds the averaged weights; afterwards, bit for bit, the trained ones.

    The copy of the trained weights uses memory that gradients leave free between two steps. A rehearsal makes it too,
    although its first evaluation comes before any average.
    """
    exists = assembly.place.rehearsed or any(assembly.optimizer.state.values())
    has_average = assembly.config.training.exports_average and exists
    held = [local_part(parameter.detach()) for parameter in assembly.trained] if has_average else []
    trained = [weights.clone() for weights in held]
    try:
        take_average(assembly)
        yield
    finally:
        for weights, before in zip(held, trained, strict=True):
            weights.copy_(before)

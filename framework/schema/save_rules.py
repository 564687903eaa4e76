"""What goes with checkpoints that are written beside training (`training.async_save`)."""

from collections.abc import Iterator

from framework.schema.config import TrainingConfig
from framework.schema.conflict import Conflict

_KEY, _STEPS = "training.async_save", "training.save_steps"


def save_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Beside the last save there is nothing left to train."""
    training = config.training
    if not training.async_save:
        return
    if training.save_steps is None:
        yield Conflict((_KEY, _STEPS), "has no effect: the only save is at the end", "training.save_steps=100")
    elif training.max_steps is not None and training.save_steps >= training.max_steps:
        message = f"has no effect: the only save is at the end, after {training.max_steps} steps"
        yield Conflict((_KEY, _STEPS), message, "fewer save_steps, or async_save: false")

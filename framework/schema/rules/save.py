"""Rules of checkpoints that are written asynchronously (`training.async_save`), and of `training.on_oom`."""

from collections.abc import Iterator

from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.intervals import steps_between
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


def last_save_conflicts(config: TrainingConfig, total: int) -> Iterator[Conflict]:
    """The same, of a run whose steps are known."""
    training = config.training
    steps = steps_between(training.save_steps, total)
    if training.async_save and steps is not None and steps >= total:
        message = f"has no effect: the only save is at the end, after {counted(total, 'step')}"
        fewer = f"training.save_steps={total // 2}, or async_save: false" if total > 1 else "training.async_save: false"
        yield Conflict((_KEY, _STEPS), message, fewer)


def survival_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """What a step that ran out of memory could not be undone with."""
    training, key = config.training, "training.on_oom"
    if training.on_oom is not OnOutOfMemory.SHRINK:
        return
    if training.optimizer_in_backward is True:
        message = "weights that change during backward cannot be put back when it runs out of memory"
        yield Conflict((key, "training.optimizer_in_backward"), message, "training.on_oom: stop")
    if training.per_device_train_batch_size == 1:
        message = "the micro batch is one row: there is nothing to halve"
        yield Conflict((key, "training.per_device_train_batch_size"), message, "stop, or more rows", is_warning=True)

"""The sizes that a run makes smaller when memory has run out, and the config of a run that has."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from framework.memory.explain.causes import Repair
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig

Size = Literal["training.per_device_train_batch_size", "training.per_device_eval_batch_size"]
TRAIN: Size = "training.per_device_train_batch_size"
EVAL: Size = "training.per_device_eval_batch_size"


def shrinks(config: TrainingConfig) -> bool:
    """Whether the run goes on after memory has run out."""
    return config.training.on_oom is OnOutOfMemory.SHRINK


def size_of(config: TrainingConfig, key: str) -> int:
    """The rows of a batch of this kind."""
    return int(getattr(config.training, key.removeprefix("training.")))


def next_size(config: TrainingConfig, key: str) -> int | None:
    """Half the rows, or less where that would not divide the global batch; None when there is one row."""
    rows = size_of(config, key)
    of_a_step = config.batch.per_device * config.batch.accumulation if key == TRAIN else 0
    return next((size for size in range(rows // 2, 0, -1) if of_a_step % size == 0), None)


def shrunk(config: TrainingConfig, repair: Repair) -> TrainingConfig:
    """The config with the smaller size, and with as many more micro batches a step."""
    training = config.training
    changes = {repair.key.removeprefix("training."): repair.after}
    if repair.key == TRAIN and (training.global_batch_size is None or training.gradient_accumulation_steps):
        changes["gradient_accumulation_steps"] = config.batch.accumulation * repair.before // repair.after
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def remembered(
    config: TrainingConfig, saved: Sequence[Mapping[str, Any]], allow: Sequence[str]
) -> tuple[TrainingConfig, list[Repair]]:
    """The config of a resumed run with the sizes that it had shrunk to, and all repairs of the checkpoint.

    A size that was written anew, or that `--allow` lets differ, stays as it is asked for.
    """
    repairs = [Repair(**repair) for repair in saved]
    for repair in repairs:
        if repair.key not in allow and size_of(config, repair.key) == repair.before:
            config = shrunk(config, repair)
    return config, repairs

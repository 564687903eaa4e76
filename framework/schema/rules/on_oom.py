"""What goes with going on after memory ran out (`training.on_oom: shrink`), and what does not."""

from collections.abc import Iterator

from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


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

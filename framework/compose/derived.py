"""Defaults that follow from what is written next to them."""

from collections.abc import Mapping

from framework.compose.origins import Origin
from framework.schema.config import TrainingConfig
from framework.schema.rules.batch import rows_of_global_batch

MICRO_BATCH = "training.per_device_train_batch_size"


def with_derived(config: TrainingConfig, origins: Mapping[str, Origin]) -> tuple[TrainingConfig, dict[str, Origin]]:
    """The config with rows a device that a written global batch is made of, where nobody wrote how many; and the
    origins that change. Rows that cannot be shared out equally stay as they are, for a rule to refuse."""
    training = config.training
    accumulation, rows = training.gradient_accumulation_steps, training.per_device_train_batch_size
    if origins[MICRO_BATCH].kind != "default" or accumulation == "auto" or rows == "auto":
        return config, {}
    found = rows_of_global_batch(config, accumulation, rows)
    if found is None or found == rows:
        return config, {}
    training = training.model_copy(update={MICRO_BATCH.removeprefix("training."): found})
    return config.model_copy(update={"training": training}), {MICRO_BATCH: Origin("default", "of the global batch")}

"""What goes with tasks that give one answer for a row: classification, regression, reward."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict

TASK = "training.task"


def classifier_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Keys that are about the logits of tokens, and labels where no row has any."""
    yield from _labels(config)
    task, data = config.training.task, config.data
    if not task.is_of_rows:
        return
    if config.model.chunked_loss not in (None, False, "auto"):
        message = f"has no effect: {task} has no logits of tokens, its head gives one answer a row"
        yield Conflict(("model.chunked_loss", TASK), message, "chunked_loss: false", is_warning=True)
    if config.training.use_peft and ADAPTERS[config.peft.peft_method].is_prompt:
        message = "trained tokens stand where the head of a row's answer would look for the row"
        yield Conflict(("peft.peft_method", TASK), message, "lora, or another that is on modules")
    if task is Task.REWARD:
        return
    for name, joins in (("packing", data.packing), ("padding_free", data.padding_free)):
        if joins:
            message = f"{task} gives one answer for a row, and {name} puts several rows into one"
            yield Conflict((f"data.{name}", TASK), message, f"{name}: false; data.group_by_length saves padding")
    if data.supervise is not None:
        message = f"{task} has no supervised tokens: a row has one target as a whole"
        yield Conflict(("data.supervise", TASK), message, "unset")


def _labels(config: TrainingConfig) -> Iterator[Conflict]:
    task, data = config.training.task, config.data
    labels = data.labels or ()
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        yield Conflict(("data.labels",), f"{twice[0]!r} is there twice", "each class once")
    elif len(labels) == 1 and task is Task.CLASSIFICATION and data.multi_label is not True:
        yield Conflict(("data.labels",), "one class is nothing to tell apart", "at least two")

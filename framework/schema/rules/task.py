"""Rules about tasks, and about models with a head for rows."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict

TASK, LOSS = "training.task", "training.preference.loss_type"


def task_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A teacher that is missing or unused, packing of pairs, and references that differ from the initial model."""
    yield from _distillation(config)
    joined = [name for name in ("packing", "padding_free") if getattr(config.data, name)]
    if config.training.task.facts.compares_answers:
        for name in joined:
            message = f"answers are compared as whole sequences, and {name} joins several"
            yield Conflict((f"data.{name}", TASK), message, f"{name}: false; data.group_by_length saves padding")
    yield from _reference(config)


def _distillation(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    teacher = training.teacher
    if training.task.facts.has_teacher:
        if teacher is None or (teacher.model_name is None and teacher.architecture is None):
            message = "there is no teacher to distill from"
            yield Conflict(("training.teacher", TASK), message, "a model_name, or an architecture")
        elif not teacher.load_pretrained_weights and teacher.architecture is None:
            keys = ("training.teacher.load_pretrained_weights", "training.teacher.architecture")
            yield Conflict(keys, "random weights need an architecture", "training.teacher.architecture")
        if config.fsdp.is_sharded:
            message = "a teacher is not sharded yet: each device would hold all of it"
            yield Conflict(("fsdp.enable_fsdp", TASK), message, "fsdp.enable_fsdp: false")
        return
    if teacher is not None:
        message = f"is used by the task distillation, and the task is {training.task}"
        yield Conflict(("training.teacher", TASK), message, "unset, or training.task=distillation")


def _reference(config: TrainingConfig) -> Iterator[Conflict]:
    training, method = config.training, config.peft.peft_method
    if not training.has_reference or training.asks_reference_once:
        return
    if config.fsdp.is_sharded:
        what = "disabling an adapter" if training.use_peft else "a frozen copy"
        message = f"the weights are sharded, and {what} needs whole ones"
        keys = ("fsdp.enable_fsdp", LOSS, "training.preference.precompute_reference")
        yield Conflict(keys, message, "training.preference.precompute_reference=true, or fsdp.enable_fsdp: false")
    if config.has_first_adapter and config.fsdp.tensor_parallel_size > 1:
        message = "each device has a part of the adapter, and the reference needs all of its initial values"
        keys = ("peft.adapter_path", "fsdp.tensor_parallel_size", "training.preference.precompute_reference")
        yield Conflict(keys, message, "training.preference.precompute_reference=true")
    if training.use_peft and ADAPTERS[method].moves_base:
        message = f"{method} changes the base at the start: without the adapter it is not the initial model"
        keys = ("peft.peft_method", LOSS, "training.preference.precompute_reference")
        yield Conflict(keys, message, "training.preference.precompute_reference=true, or lora")


def classifier_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings about logits of tokens in tasks of rows, and wrong lists of labels."""
    task, data = config.training.task, config.data
    labels = data.labels or ()
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        yield Conflict(("data.labels",), f"{twice[0]!r} occurs twice", "each class once")
    elif len(labels) == 1 and task.facts.label == "class" and data.multi_label is not True:
        yield Conflict(("data.labels",), "one class is nothing to classify", "at least two")
    if not task.facts.is_of_rows:
        return
    if config.model.chunked_loss not in (None, False, "auto"):
        message = f"has no effect: {task} has no logits of tokens, only one output per row"
        yield Conflict(("model.chunked_loss", TASK), message, "chunked_loss: false", is_warning=True)
    if config.training.use_peft and ADAPTERS[config.peft.peft_method].is_prompt:
        message = "virtual tokens would take the position that the head reads"
        yield Conflict(("peft.peft_method", TASK), message, "lora, or another kind that adapts modules")
    if task.facts.compares_answers:
        return
    for name, joins in (("packing", data.packing), ("padding_free", data.padding_free)):
        if joins:
            message = f"{task} has one output per row, and {name} joins several rows"
            yield Conflict((f"data.{name}", TASK), message, f"{name}: false; data.group_by_length saves padding")
    if data.supervise is not None:
        message = f"{task} has no supervised tokens: a row has one target"
        yield Conflict(("data.supervise", TASK), message, "unset")

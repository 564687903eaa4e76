"""Rules about evaluations, samples, saves and retries after out of memory."""

from collections.abc import Iterator
from difflib import get_close_matches

from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import FROM_PYTHON, steps_between
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict


def best_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings of the best checkpoint without evaluations or with an unknown metric."""
    training = config.training
    asked = [
        f"training.{name}"
        for name in ("best_metric", "early_stopping_patience", "export_best")
        if getattr(training, name)
    ]
    if asked and training.eval_steps is None:
        yield Conflict((asked[0], "training.eval_steps"), "needs evaluations to compare", "training.eval_steps=epoch")
    names = dict.fromkeys(source.eval_set for source in config.data.eval if source.eval_set)
    metrics = training.task.facts.metrics
    known = [*metrics, *(f"{metric}/{name}" for metric in metrics for name in names)]
    best = training.best_metric
    if best is not None and best not in known and not best.startswith(FROM_PYTHON):
        close = get_close_matches(best, known, 1)
        message = f"an evaluation of {training.task} has no {best}"
        yield Conflict(("training.best_metric", "training.task"), message, close[0] if close else ", ".join(known))
    if training.export_best and training.best_metric is None:
        keys = ("training.export_best", "training.best_metric")
        yield Conflict(keys, "does not say which is the best", "training.best_metric=eval_loss")


def eval_set_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Named evaluation sets: all sources or none have a name, and sources of a set are adjacent."""
    data = config.data
    for index, source in enumerate(data.train):
        if source.eval_set is not None:
            yield Conflict((f"data.train[{index}].eval_set",), "names an evaluation set", "data.eval, or no name")
    names = [source.eval_set for source in data.eval]
    changes = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    if any(names) and not all(names):
        key = f"data.eval[{names.index(None)}].eval_set"
        yield Conflict((key,), "other sources have a named set, and this one has none", "a name for each")
    elif len(changes) > len({*changes}):
        yield Conflict(("data.eval",), "sources of a set are not adjacent", "`eval: {NAME: [its sources], ...}`")


def sample_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Samples without evaluations, or without a device that holds the whole model."""
    training, data, key = config.training, config.data, "training.sample_prompts"
    if not training.sample_prompts:
        return
    if not data.eval and not data.eval_fraction:
        message = "is for evaluations, and there is no data for them"
        yield Conflict((key, "data.eval", "data.eval_fraction"), message, "data.eval or data.eval_fraction")
    if config.gpu.count > 1 and not (config.is_replicated and config.sharing == 1):
        message = "a completion would gather all split weights for each of its tokens"
        yield Conflict((key, "gpu.count"), message, "no prompts, or `tunesmith predict` afterwards")


_KEY, _STEPS = "training.async_save", "training.save_steps"


def save_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Asynchronous saves without a save before the end."""
    training = config.training
    if not training.async_save:
        return
    if training.save_steps is None:
        yield Conflict((_KEY, _STEPS), "has no effect: the only save is at the end", "training.save_steps=100")
    elif training.max_steps is not None:
        yield from last_save_conflicts(config, training.max_steps)


def last_save_conflicts(config: TrainingConfig, total: int) -> Iterator[Conflict]:
    """`save_conflicts` for a run whose number of steps is known."""
    training = config.training
    steps = steps_between(training.save_steps, total)
    if training.async_save and steps is not None and steps >= total:
        message = f"has no effect: the only save is at the end, after {counted(total, 'step')}"
        fewer = f"training.save_steps={total // 2}, or async_save: false" if total > 1 else "training.async_save: false"
        yield Conflict((_KEY, _STEPS), message, fewer)


def survival_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings under which a step that ran out of memory cannot be undone."""
    training, key = config.training, "training.on_oom"
    if training.on_oom is not OnOutOfMemory.SHRINK:
        return
    if training.optimizer_in_backward is True:
        message = "weights that change during backward cannot be restored after running out of memory"
        yield Conflict((key, "training.optimizer_in_backward"), message, "training.on_oom: stop")
    if training.per_device_train_batch_size == 1:
        message = "the micro-batch is one row: there is nothing to halve"
        yield Conflict((key, "training.per_device_train_batch_size"), message, "stop, or more rows", is_warning=True)

"""What the keys of `data` ask of each other."""

from collections.abc import Iterator

from framework.schema.choices import Mixing, Task
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


def data_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Weights and the rule of the mixture, which need each other; what cannot be had of a stream."""
    yield from _mixing(config)
    if config.data.streaming:
        yield from _streaming(config)


def _streaming(config: TrainingConfig) -> Iterator[Conflict]:
    data, key = config.data, "data.streaming"
    if config.training.max_steps is None:
        message = "the length of streamed data is not known, so the number of steps must be"
        yield Conflict((key, "training.max_steps"), message, "training.max_steps")
    if data.eval_fraction and not data.eval:
        message = "rows can be held out of a stream only by reading all of it first"
        yield Conflict((key, "data.eval_fraction"), message, "data.eval, such as a slice: `split: train[:500]`")
    if data.group_by_length:
        message = "the lengths of streamed rows are not known before they are read"
        yield Conflict((key, "data.group_by_length"), message, "data.packing or data.padding_free")
    if config.training.asks_reference_once:
        message = "rows that are read as they are needed cannot be asked about before the first step"
        yield Conflict((key, "training.preference.precompute_reference"), message, "false")
    if data.workers > 1:
        message = "a stream is read in order, by one process"
        yield Conflict((key, "data.workers"), message, "0 or 1")
    if config.training.task is Task.CLASSIFICATION and not data.labels:
        message = "the classes of a stream are not known before its end"
        yield Conflict((key, "data.labels"), message, "data.labels: [their names]")


def _mixing(config: TrainingConfig) -> Iterator[Conflict]:
    data, rules = config.data, "first_exhausted or all_exhausted"
    weighted = [index for index, source in enumerate(data.train) if source.weight is not None]
    for index, source in enumerate(data.eval):
        if source.weight is not None:
            message = "evaluation reads every row once, so its sources have no weights"
            yield Conflict((f"data.eval[{index}].weight",), message, "no weight")
    if data.mixing is Mixing.CONCATENATE:
        if weighted:
            keys = (f"data.train[{weighted[0]}].weight", "data.mixing")
            yield Conflict(keys, "nothing says when a mixture by weight ends", f"data.mixing: {rules}")
        return
    if len(data.train) == 1:
        yield Conflict(("data.mixing", "data.train"), "there is one source, so nothing to mix", "concatenate")
    elif unweighted := [index for index in range(len(data.train)) if index not in weighted]:
        names = ", ".join(f"data.train[{index}].weight" for index in unweighted)
        message = f"a mixture needs the weight of every source, and {names} is not set"
        yield Conflict(("data.mixing", f"data.train[{unweighted[0]}].weight"), message, "a weight, such as 1, in each")

"""What the keys of `data` ask of each other."""

from collections.abc import Iterator

from framework.schema.choices import Mixing
from framework.schema.config import TrainingConfig
from framework.schema.conflict import Conflict


def data_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Weights and the rule of the mixture, which need each other."""
    yield from _mixing(config)


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

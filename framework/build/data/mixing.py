"""Several sources as one, each row drawn from one of them by weight."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from framework.errors import Problem, RequestError
from framework.schema.choices import Mixing
from framework.schema.data import DatasetParams


def shares_of(sources: Sequence[DatasetParams]) -> list[float]:
    """The weights of the sources, made to add up to 1. They all have one."""
    weights = [source.weight or 0.0 for source in sources]
    return [weight / sum(weights) for weight in weights]


def nothing_to_draw(key: str, path: str) -> Problem:
    """A source of a mixture of which no row is kept."""
    return Problem(key, f"no row of {path} is left, so none can be drawn for the mixture")


def mixture(sources: Sequence[DatasetParams], counts: Sequence[int], rule: Mixing, seed: int) -> npt.NDArray[np.int64]:
    """Numbers of the rows of one epoch, where the sources have `counts` rows and stand one after the other.

    The draws and the rule that ends them are those of `datasets.interleave_datasets`. Rows of a source are taken in
    their order, from the first again when they are used up; batches shuffle them. Raises RequestError for a source
    without rows.
    """
    empty = [index for index, count in enumerate(counts) if not count]
    if empty:
        raise RequestError([nothing_to_draw(f"data.train[{index}]", sources[index].path) for index in empty])
    import datasets  # takes seconds, with pandas

    ends = np.cumsum(counts)
    numbers = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    parts = [datasets.Dataset.from_dict({"row": part}) for part in numbers]
    mixed = datasets.interleave_datasets(parts, shares_of(sources), seed=seed, stopping_strategy=str(rule))
    return np.asarray(mixed.with_format("numpy")["row"][:], dtype=np.int64)

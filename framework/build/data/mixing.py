"""Several sources as one: named sets of held-out rows, and mixtures of which each row is drawn by weight."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from framework.build.data.packing import Packs, pack
from framework.build.data.rows import Rows
from framework.errors import Problem, RequestError
from framework.schema.choices import Mixing
from framework.schema.data import DatasetParams, Datasets


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


EvalSets = dict[str, range]
"""Name -> numbers of its rows, or packs."""


def find_sets(sources: Datasets, kept: Sequence[int]) -> EvalSets:
    """The sets of rows, of which `kept` are of each source; empty where sources have no names, and for rows held out
    of training. Sources of a set stand next to each other. Raises RequestError for a set of which no row is kept."""
    if not sources or sources[0].eval_set is None:
        return {}
    sets, problems, end = EvalSets(), list[Problem](), 0
    for index, (source, count) in enumerate(zip(sources, kept, strict=True)):
        name = str(source.eval_set)
        sets[name] = range(sets[name].start if name in sets else end, end := end + count)
        is_last = index + 1 == len(sources) or sources[index + 1].eval_set != name
        if is_last and not sets[name]:
            message = f"no row of the set {name} is left to evaluate on"
            problems.append(Problem(f"data.eval[{index}]", message, expected="rows within the length limit"))
    if problems:
        raise RequestError(problems)
    return sets


def pack_sets(rows: Rows, sets: EvalSets, limit: int, seed: int) -> tuple[Packs, EvalSets]:
    """Packs that hold rows of one set each, and the packs of each set."""
    packed = {name: pack(rows, limit, seed, among=np.array(numbers)) for name, numbers in sets.items()}
    found, start = EvalSets(), 0
    for name, packs in packed.items():
        found[name] = range(start, start := start + len(packs))
    members = np.concatenate([packs.members for packs in packed.values()])
    sizes = np.concatenate([np.diff(packs.offsets) for packs in packed.values()])
    return Packs(rows, members, np.concatenate([[0], np.cumsum(sizes)])), found

"""Mixtures of sources sampled by weight, and named sets of held-out rows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from framework.build.data.packing import Packs, pack
from framework.build.data.rows import Rows
from framework.errors import Problem, RequestError
from framework.schema.choices import Mixing
from framework.schema.data import DatasetParams, Datasets


def shares_of(sources: Sequence[DatasetParams]) -> list[float]:
    """The weights of the sources, normalized to a sum of 1."""
    weights = [source.weight or 0.0 for source in sources]
    return [weight / sum(weights) for weight in weights]


def nothing_to_draw(key: str, path: str) -> Problem:
    """Problem for a source of a mixture without rows."""
    return Problem(key, f"no row of {path} is left to sample for the mixture")


def mixture(sources: Sequence[DatasetParams], counts: Sequence[int], rule: Mixing, seed: int) -> npt.NDArray[np.int64]:
    """Row indices of one epoch, for concatenated sources with `counts` rows.

    The draws and the rule that ends them are those of `datasets.interleave_datasets`. Rows of a source are taken in
    order, starting over when they run out; batches shuffle them. Raises RequestError for a source without rows.
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
"""Name -> indices of its rows or packs."""


def find_sets(sources: Datasets, kept: Sequence[int]) -> EvalSets:
    """The named sets, given the rows `kept` of each source; empty if the sources have no names, and for rows held out
    of training. Sources of a set are adjacent. Raises RequestError for a set without rows."""
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
    """Packs with rows of one set each, and the indices of each set's packs."""
    packed = {name: pack(rows, limit, seed, among=np.array(numbers)) for name, numbers in sets.items()}
    found, start = EvalSets(), 0
    for name, packs in packed.items():
        found[name] = range(start, start := start + len(packs))
    members = np.concatenate([packs.members for packs in packed.values()])
    sizes = np.concatenate([np.diff(packs.offsets) for packs in packed.values()])
    return Packs(rows, members, np.concatenate([[0], np.cumsum(sizes)])), found

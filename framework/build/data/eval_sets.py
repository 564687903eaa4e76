"""The named sets of held-out rows."""

from collections.abc import Sequence

import numpy as np

from framework.build.data.packing import Packs, pack
from framework.build.data.rows import Rows
from framework.errors import Problem, RequestError
from framework.schema.data import Datasets

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

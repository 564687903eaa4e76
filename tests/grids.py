"""Grids of cases of which the quick tests see every row and every column, and the slow ones the rest."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Cases = Mapping[str, Any] | Sequence[Any]
"""Cases by their names, or named as they print; in a sequence also pytest's parameters."""
slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that is not in the quick suite."""


def thinned(rows: Cases, columns: Cases) -> list[ParameterSet]:
    """A parameter (row, column) of each pair, with the id `row-column`."""
    down, across = _named(rows), _named(columns)
    period = min(len(down), len(across))
    return [
        pytest.param(
            *row, *column, id=f"{name}-{label}", marks=[*marks, *([pytest.mark.slow] * bool((i - j) % period))]
        )
        for i, (name, row, marks) in enumerate(down)
        for j, (label, column, _) in enumerate(across)
    ]


def _named(cases: Cases) -> list[tuple[str, Sequence[Any], Sequence[Any]]]:
    if isinstance(cases, Mapping):
        return [(name, [value], []) for name, value in cases.items()]
    parameters = [each if isinstance(each, ParameterSet) else pytest.param(each) for each in cases]
    return [(each.id or str(each.values[0]), each.values, list(each.marks)) for each in parameters]

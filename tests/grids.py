"""Cases of which the quick tests see some of each kind, and the slow ones the rest."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Cases = Mapping[str, Any] | Sequence[Any]
"""Cases by their names, or named as they print; in a sequence also pytest's parameters."""
slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that is not in the quick suite."""


def thinned(*axes: Cases) -> list[ParameterSet]:
    """A parameter of each combination of the axes' cases, with their names as its id: quick are as many as the longest
    axis has cases, which hold every case of every axis."""
    named = [_named(axis) for axis in axes]
    quick = {tuple(number % len(axis) for axis in named) for number in range(max(map(len, named)))}
    parameters = []
    for places in product(*(range(len(axis)) for axis in named)):
        names, values, marks = zip(*(axis[place] for axis, place in zip(named, places, strict=True)), strict=True)
        rare = [pytest.mark.slow] * (places not in quick)
        parameters.append(pytest.param(*chain(*values), id="-".join(names), marks=[*chain(*marks), *rare]))
    return parameters


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which the quick suite sees `count`; a tuple has a value for each argument."""
    listed = list(cases)
    return [*listed[:count], *map(_rare, listed[count:])]


def chosen(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which the quick suite sees those whose first value is named."""
    return [case if _values(case)[0] in quick else _rare(case) for case in cases]


def to_make(request: pytest.FixtureRequest, quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases that a fixture of a module makes: the quick ones, or all where a slow test of the module is to run."""
    here = [item for item in request.session.items if item.path == request.path]
    return [case for case in cases if case in quick or any(item.get_closest_marker("slow") for item in here)]


def _values(case: Any) -> Sequence[Any]:
    if isinstance(case, ParameterSet):
        return case.values
    return case if isinstance(case, tuple) else (case,)


def _rare(case: Any) -> ParameterSet:
    marks, name = (case.marks, case.id) if isinstance(case, ParameterSet) else ((), None)
    return pytest.param(*_values(case), id=name, marks=[*marks, pytest.mark.slow])


def _named(cases: Cases) -> list[tuple[str, Sequence[Any], Sequence[Any]]]:
    if isinstance(cases, Mapping):
        return [(name, [value], []) for name, value in cases.items()]
    parameters = [each if isinstance(each, ParameterSet) else pytest.param(each) for each in cases]
    return [(each.id or _label(each.values[0]), each.values, list(each.marks)) for each in parameters]


def _label(value: Any) -> str:
    return str(value.get("model_type", value) if isinstance(value, Mapping) else value)

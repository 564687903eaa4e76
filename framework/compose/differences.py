"""The keys in which two composed requests differ."""

from dataclasses import asdict, dataclass
from typing import Any

from framework.compose.origins import DEFAULT, Origin
from framework.compose.request import Composition
from framework.schema.keys import dotted, values

ABSENT = "(absent)"
"""Stands for an item or free key that only the other request has."""


@dataclass(frozen=True)
class Difference:
    """One key, its two values, and who wrote each."""

    key: str
    a: Any
    b: Any
    origin_a: Origin
    origin_b: Origin

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def differences(a: Composition, b: Composition) -> list[Difference]:
    """In the order of the schema. Lists are compared item by item."""
    ours, theirs = _values(a), _values(b)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        Difference(
            key,
            ours.get(key, ABSENT),
            theirs.get(key, ABSENT),
            a.origins.get(key, DEFAULT),
            b.origins.get(key, DEFAULT),
        )
        for key in keys
        if ours.get(key, ABSENT) != theirs.get(key, ABSENT)
    ]


def _values(composition: Composition) -> dict[str, Any]:
    pairs = ((dotted(path), value) for path, value in values(composition.config))
    return {key: value for key, value in pairs if not (isinstance(value, list | tuple | dict) and value)}

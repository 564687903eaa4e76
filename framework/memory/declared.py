"""Type check of dataclasses that were filled from a file, which may be damaged or of another version. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
GREATEST = 2.0**100
"""Upper limit for counts of bytes, steps or operations; quotients of much larger integers overflow a float."""


def declared(value: T) -> T:
    """Return the dataclass unchanged. Raises TypeError naming a field of another type and its value."""
    for name, found in _others(value):
        raise TypeError(f"{name} is {str(found)[:40]!r}")
    return value


def _others(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Fields whose values do not match their declared types, including those of nested dataclasses."""
    hints = get_type_hints(type(value))
    for field in fields(value):
        inner = getattr(value, field.name)
        path = f"{name}.{field.name}".lstrip(".")
        if not _fits(inner, hints[field.name]):
            yield path, inner
        for part in inner if isinstance(inner, tuple) else (inner,):
            if is_dataclass(part):
                yield from _others(part, path)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    if hint in (int, float):
        return type(value) in {int, hint} and abs(value) < GREATEST  # excludes NaN
    return isinstance(value, hint)

"""Base class of all sections, and number types that accept the usual spellings."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Auto = Literal["auto"]
"""The value that asks `fit`'s search to choose. Exactly the levers that a search moves admit it."""

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?")


class Params(BaseModel):
    """A section of the configuration: frozen, strict, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The values that differ from the defaults, since a config has over a hundred keys."""
        fields = type(self).model_fields
        return ((name, value) for name, value in super().__repr_args__() if value != fields[name or ""].default)


def parse_number(value: object) -> object:
    """`1e-5`, `2E-5`, `'1e-5'` and `1_000` are numbers; anything else is passed on, to be refused by the type."""
    if isinstance(value, str) and len(value) < 64 and _NUMBER.fullmatch(value.strip()):
        number = float(value.replace("_", ""))
        return number if math.isfinite(number) else value
    return value


def parse_integer(value: object) -> object:
    """A whole number in any spelling is an integer (`1e3` is 1000); `1.5` is passed on, to be refused."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d[\d_]*\s*", value) and len(value) < 64:
        return int(value)
    value = parse_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def parse_sequence(value: object) -> object:
    """A YAML list as a tuple, since a frozen config must hold nothing mutable."""
    return tuple(value) if isinstance(value, list) else value


Integer = Annotated[int, BeforeValidator(parse_integer)]
Number = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]
"""Finite: `1e999` and NaN are refused."""
Strings = Annotated[tuple[str, ...], BeforeValidator(parse_sequence)]


class FrozenMapping(Mapping[str, Any]):
    """A deeply immutable mapping: lists become tuples, mappings become frozen."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] = {}) -> None:
        self._items = {key: _freeze(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(repr(sorted(self._items.items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"

    def thaw(self) -> dict[str, Any]:
        """A deep copy of dicts and lists, for libraries and YAML."""
        return {key: _thaw(value) for key, value in self._items.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text_keys = core_schema.dict_schema(core_schema.str_schema(strict=True), core_schema.any_schema(), strict=True)
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(cls, text_keys),
            python_schema=core_schema.union_schema(
                [
                    core_schema.is_instance_schema(cls),
                    core_schema.no_info_after_validator_function(cls, text_keys),
                ]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda mapping: mapping.thaw()),
        )


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, FrozenMapping):
        return value.thaw()
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value

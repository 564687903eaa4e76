"""Arrow batches as Python rows: without the nulls that structs add, and with dates that Python cannot hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, repr=False)
class OutOfRange:
    """Stands for a value that Python has no object for: a date after the year 9999, PostgreSQL's `infinity`, a time of
    nanoseconds. Nothing is wrong with a row until the column is read."""

    kind: str

    def __repr__(self) -> str:
        return f"{self.kind} that Python cannot hold"


def python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch, by column.

    A struct has one set of fields for all rows, so a key that only some rows have is null in the others. Such keys are
    left out below the columns: a tool call has the arguments that were written.
    """
    names = batch.schema.names
    columns = [without_nulls(_values(column)) if has_struct(column.type) else _values(column) for column in batch]
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def has_struct(kind: pa.DataType) -> bool:
    """Whether there is a struct somewhere in values of this type."""
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(map(has_struct, inner))


def without_nulls(value: Any) -> Any:
    """The value without the fields of its structs that are null; nulls in lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and isinstance(next((each for each in value if each is not None), None), (dict, list)):
        return [without_nulls(each) for each in value]
    return value


def _values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError, KeyError):  # KeyError: a time zone that is not known here
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, KeyError):
        return OutOfRange(str(scalar.type))

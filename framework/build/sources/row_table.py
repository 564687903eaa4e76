"""Table of rows over Arrow columns, in place of `datasets`, which takes seconds to import."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class RowTable:
    """Rows of an Arrow table, or the rows selected by the indices `order`, in that order."""

    def __init__(self, table: pa.Table, order: npt.NDArray[np.int64] | None = None) -> None:
        self._pieces = table.to_batches()
        self._schema = table.schema
        self._ends = np.cumsum([len(piece) for piece in self._pieces], dtype=np.int64)
        self._order = order

    def __len__(self) -> int:
        if self._order is not None:
            return len(self._order)
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, column: str) -> list[Any]:
        """The values of a column."""
        return [value for batch in self.iter(len(self)) for value in batch[column]] if len(self) else []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each row, its values by column."""
        for number in range(len(self)):
            yield {column: values[0] for column, values in self._part(number, number + 1).items()}

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Batches of rows as columns."""
        for start in range(0, len(self), batch_size):
            yield self._part(start, min(start + batch_size, len(self)))

    def select(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> "RowTable":
        """The rows with these indices."""
        order = np.asarray(numbers, dtype=np.int64)
        return RowTable(self.table, order if self._order is None else self._order[order])

    @property
    def table(self) -> pa.Table:
        """The underlying table, without the selection."""
        return pa.Table.from_batches(self._pieces, self._schema)

    def _part(self, start: int, end: int) -> dict[str, list[Any]]:
        """Rows as columns, from slices of the pieces, since Arrow's `take` would concatenate all pieces first."""
        numbers = np.arange(start, end) if self._order is None else self._order[start:end]
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)  # starts of runs of consecutive rows
        slices: list[pa.RecordBatch] = []
        for first, after in zip(starts, [*starts[1:], len(numbers)], strict=True):
            slices += self._run(int(numbers[first]), int(after - first))
        found: dict[str, list[Any]] = pa.Table.from_batches(slices, self._schema).to_pydict()
        return found

    def _run(self, number: int, count: int) -> Iterator[pa.RecordBatch]:
        """Slices of the pieces for `count` consecutive rows from `number` on."""
        at = int(np.searchsorted(self._ends, number, side="right"))
        while count:
            begin = int(self._ends[at]) - len(self._pieces[at])
            piece = self._pieces[at].slice(number - begin, count)
            yield piece
            number, count, at = number + len(piece), count - len(piece), at + 1


def joined(tables: Sequence[RowTable]) -> RowTable:
    """Concatenation of tables; columns that a table lacks are null."""
    return RowTable(pa.concat_tables([each.table for each in tables], promote_options="default"))

"""Rows as Arrow columns, taken in parts and by number."""

import pyarrow as pa
import pytest

from framework.build.sources.row_table import RowTable, joined

PIECES = ([{"n": 0, "m": [{"a": "x", "b": None}]}, {"n": 1, "m": []}], [{"n": 2, "m": None}], [], [{"n": 3, "m": []}])
ROWS = [row for piece in PIECES for row in piece]


@pytest.fixture
def table() -> RowTable:
    turn = pa.struct({"a": pa.string(), "b": pa.int64()})
    schema = pa.schema({"n": pa.int64(), "m": pa.list_(turn)})
    return joined([RowTable(pa.Table.from_pylist(list(piece), schema)) for piece in PIECES])


def test_rows_are_what_was_put_in(table: RowTable) -> None:
    assert len(table) == 4
    assert list(table) == ROWS
    assert table["m"] == [row["m"] for row in ROWS]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_parts_go_across_pieces(table: RowTable, size: int) -> None:
    parts = list(table.iter(size))
    assert [len(part["n"]) for part in parts] == [min(size, 4 - at) for at in range(0, 4, size)]
    assert [number for part in parts for number in part["n"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("numbers", [[3, 0, 0, 2], [1, 2, 3], [2], [], range(1, 3)])
def test_chosen_rows_come_in_the_order_of_their_numbers(table: RowTable, numbers: list[int]) -> None:
    chosen = table.select(numbers)
    assert list(chosen) == [ROWS[number] for number in numbers]
    assert chosen["n"] == list(numbers)
    backwards = chosen.select(range(len(chosen))[::-1])
    assert backwards["n"] == list(numbers)[::-1]


def test_of_nothing_there_is_nothing() -> None:
    empty = RowTable(pa.Table.from_pylist([], pa.schema({"n": pa.int64()})))
    assert len(empty) == 0
    assert list(empty) == list(empty.iter(2)) == empty["n"] == []

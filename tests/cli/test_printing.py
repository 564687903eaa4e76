"""Tables of a verb: aligned in a pipe, folded into a terminal that is narrower."""

import os

import pytest

from framework.cli.printing import print_columns, print_warnings
from framework.errors import Problem

ROWS = [
    ("key", "values", "training"),
    ("training.gradient_checkpointing_policy", "save_matmuls, save_attention, full", "exact"),
    ("", "none", "changed by " + "adamw_torchao_8bit, " * 4 + "sgd"),
]
NAMES = [("adamw_8bit", "AdamW with 8-bit states: " + "two bytes a weight, " * 6 + "in all"), ("sgd", "no states")]


@pytest.fixture
def shown(capsys, monkeypatch):
    def show(rows, columns: int = 0) -> list[str]:
        monkeypatch.setattr("sys.stdout.isatty", lambda: columns > 0)
        monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
        print_columns(rows)
        return capsys.readouterr().out.splitlines()

    return show


def test_in_a_pipe_a_row_is_a_line(shown) -> None:
    lines = shown(ROWS)
    assert len(lines) == len(ROWS)
    assert {line.index(row[1]) for line, row in zip(lines, ROWS, strict=True)} == {len(ROWS[1][0]) + 2}


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("rows", [ROWS, NAMES])
def test_a_narrow_terminal_has_every_word_and_the_first_cells_whole(rows, columns, shown) -> None:
    lines = shown(rows, columns)
    assert max(map(len, lines)) <= columns
    assert all(any(line.startswith(first) for line in lines) for first, *_ in rows)
    assert sorted(" ".join(lines).split()) == sorted(" ".join(cell for row in rows for cell in row).split())


def test_a_wide_terminal_is_as_a_pipe(shown) -> None:
    assert shown(ROWS, 400) == shown(ROWS)


def test_no_rows_are_no_lines(shown) -> None:
    assert shown([], 80) == []


def test_a_warning_is_one_line_with_its_place_in_brackets(capsys) -> None:
    print_warnings(["a", Problem("data.workers", "64 for 2 cores", where="r.yaml:3", expected="at most 1")])
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning a", "warning data.workers: 64 for 2 cores (at r.yaml:3; expected at most 1)"]

"""A number agrees with what it counts, in the helper and in every sentence that has a count in it."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import framework
from framework.schema.plural import counted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1, "row"), "1 row"),
        ((0, "row"), "0 rows"),
        ((2048, "token"), "2,048 tokens"),
        ((1, "process is", "processes are"), "1 process is"),
        ((3, "process is", "processes are"), "3 processes are"),
    ],
)
def test_a_number_agrees_with_what_it_counts(given: tuple[int, str], text: str) -> None:
    assert counted(*given) == text


@pytest.mark.slow
def test_every_length_that_a_sentence_counts_by_agrees_with_it() -> None:
    """`{len(x)} rows` would say `1 rows`."""
    found = list[str]()
    for file in sorted(Path(framework.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for value, text in pairwise(parts):
                is_length = isinstance(value, ast.FormattedValue) and ast.unparse(value.value).startswith(
                    ("len(", "sum(")
                )
                if is_length and isinstance(text, ast.Constant) and re.match(r" ([a-z]+ ){0,2}[a-z]+s\b", text.value):
                    found.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert found == []

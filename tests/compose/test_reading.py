"""The bounded reader: the meaning of YAML here, the location of each value, and refused files."""

import time
from pathlib import Path

import pytest

from framework.compose.origins import leaves
from framework.compose.reading import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read
from framework.errors import Problem
from framework.text import scalar


def read_text(tmp_path: Path, text: str | bytes):
    file = tmp_path / "r.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[Problem] = []
    return read(file, "r.yaml", "recipe", problems), problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2E-5", 2e-5),
        ("1.0e-5", 1e-5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("on", "on"),
        ("2024-01-02", "2024-01-02"),
        ("1e5x", "1e5x"),
        ("12:30", "12:30"),
        ("1e999", "1e999"),
        (".inf", ".inf"),
        ("9" * 19, "9" * 19),
        ("tRue", "tRue"),
    ],
)
def test_unquoted_words(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_every_value_and_item_keeps_its_line(tmp_path):
    node, problems = read_text(tmp_path, "training:\n  seed: 3\nmodel:\n  freeze_layers:\n    - a\n    - b\n")
    places = {".".join(map(str, path)): leaf.origin.where for path, leaf in leaves(node)}
    assert not problems
    assert places == {
        "training.seed": "r.yaml:2",
        "model.freeze_layers": "r.yaml:4",
        "model.freeze_layers.0": "r.yaml:5",
        "model.freeze_layers.1": "r.yaml:6",
    }


def test_an_alias_within_bounds_is_its_value(tmp_path):
    node, problems = read_text(tmp_path, "a: &x {k: 1}\nb: *x\n")
    assert not problems
    assert node.plain() == {"a": {"k": 1}, "b": {"k": 1}}


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("- a\n", 1, "mapping"),
        ("word\n", 1, "mapping"),
        ("a: 1\n---\nb: 2\n", 2, "one document"),
        ("a: 1\nb: {c: 2\n", 3, "not YAML"),
        ("a:\n\tb: 1\n", 2, "not YAML"),
        (b"a: 1\nb: \xe9\n", 2, "UTF-8"),
        ("a: 1".encode("utf-16"), 1, "UTF-8"),
        (b"a: 1\nb: \x00\n", 2, "not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, "twice, first in line 1"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tags"),
        ("a: !!str 3\n", 1, "tags"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("1: a\n", 1, "key must be text"),
        ("? [a]\n: b\n", 1, "key must be text"),
        ("? " * 5000, 1, "deeper"),
        ("a: " + "[" * 500_000, 1, ""),
        ("a: " + "{b: " * 200_000, 1, "deeper"),
        ("a: &a [*a]\n", 1, "`*a`"),
        (LAUGHS, 4, "aliases counted in full"),
        ("a:\n" + "".join(f"  - {n}\n" for n in range(MAX_VALUES)), MAX_VALUES - 1, "more than"),
        ("a: " + "x" * MAX_BYTES, 1, "larger"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_refused_with_a_line_and_in_time(tmp_path, text, line, word):
    start = time.process_time()
    _, problems = read_text(tmp_path, text)
    assert problems[0].where == f"r.yaml:{line}"
    assert word in problems[0].message
    assert time.process_time() - start < 3


def test_several_faults_of_one_file_are_reported_together(tmp_path):
    node, problems = read_text(tmp_path, "a: 1\na: 2\nb: !t 3\n1: x\n")
    assert node is not None
    assert [problem.where for problem in problems] == ["r.yaml:2", "r.yaml:3", "r.yaml:4"]
    assert problems[0].key == "a"


def test_depth_is_counted_from_the_root(tmp_path):
    assert read_text(tmp_path, "a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)[0] is not None
    assert read_text(tmp_path, "a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))[0] is None


def test_a_byte_order_mark_is_no_fault(tmp_path):
    node, problems = read_text(tmp_path, b"\xef\xbb\xbfa: 1\n")
    assert not problems
    assert node.plain() == {"a": 1}


def test_a_folder_is_not_read(tmp_path):
    problems: list[Problem] = []
    assert read(tmp_path, "r", "recipe", problems) is None
    assert "cannot be read" in problems[0].message

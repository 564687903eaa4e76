"""Rows that a program hands over in place of a file: a list of mappings, any iterable, or a function that yields them.

YAML never names code. A config says that rows came from Python (`path: python_rows`) and what they add up to
(`digest`); the rows themselves are handed over anew with each run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from framework.build.sources.files import Fault, Record
from framework.build.sources.find_files import PYTHON_ROWS
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.data import DatasetParams, Datasets

PythonRows: TypeAlias = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""Rows by column. A function is called each time the rows are read, so what it returns may be a generator."""


@dataclass(frozen=True)
class RowsFromPython:
    """The rows that were handed over, by where they belong."""

    train: PythonRows | None = None
    eval: PythonRows | None = None


NO_ROWS = RowsFromPython()


def take_rows(config: TrainingConfig, given: RowsFromPython) -> tuple[TrainingConfig, RowsFromPython]:
    """The config that says which of its sources the rows are and what they add up to; and the rows, to be read often.

    Rows are held in a list, unless `data.streaming` reads those of training as they are needed: then nothing is known
    of what they add up to. Raises RequestError when config and rows do not go together.
    """
    problems: list[Problem] = []
    train = _taken(config.data.train, "data.train", given.train, config.data.streaming, problems)
    held_out = _taken(config.data.eval, "data.eval", given.eval, False, problems)
    if problems:
        raise RequestError(problems)
    data = config.data.model_copy(update={"train": train[0], "eval": held_out[0]})
    return config.model_copy(update={"data": data}), RowsFromPython(train[1], held_out[1])


def python_records(rows: PythonRows) -> Iterator[Record]:
    """The rows that were handed over, numbered from 1."""
    for number, row in enumerate(rows() if callable(rows) else rows, 1):
        fault = Fault(f"expected a mapping of columns, not {type(row).__name__}")
        yield number, dict(row) if isinstance(row, Mapping) else fault


def _taken(
    sources: Datasets, key: str, rows: PythonRows | None, is_streamed: bool, problems: list[Problem]
) -> tuple[Datasets, PythonRows | None]:
    """The sources with the digest written in, and the rows."""
    if rows is None:
        return sources, None
    sources = sources or (DatasetParams(path=PYTHON_ROWS),)
    places = [index for index, source in enumerate(sources) if source.path == PYTHON_ROWS]
    if len(places) != 1:
        message = f"rows are given from Python, and {'none' if not places else len(places)} of the sources is them"
        problems.append(Problem(key, message, expected=f"one source {{path: {PYTHON_ROWS}}}"))
        return sources, None
    if is_streamed:
        if isinstance(rows, Iterator):
            message = "a stream may be read several times, and these rows can be iterated once"
            problems.append(Problem(key, message, expected="the function that makes the iterator"))
        return sources, rows
    held = list(rows() if callable(rows) else rows)
    index, found = places[0], digest(held)
    if sources[index].digest not in (None, found):
        message = f"other rows are given than those that were recorded: they add up to {found}"
        problems.append(Problem(f"{key}[{index}].digest", message, expected=f"{sources[index].digest}"))
    named = sources[index].model_copy(update={"digest": found})
    return (*sources[:index], named, *sources[index + 1 :]), held


def digest(rows: Iterable[Any]) -> str:
    """What the rows add up to: SHA-256 of each as JSON, in order; values that JSON has no word for as they print."""
    found = hashlib.sha256()
    for row in rows:
        document = dict(row) if isinstance(row, Mapping) else row
        found.update(json.dumps(document, sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()[:32]

"""Rows passed by a Python program instead of a file: a list of mappings, any iterable, or a function that yields them.

YAML never names code. A config records that rows came from Python (`path: python_rows`) and their `digest`; the rows
themselves are passed again with each run.
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
"""Rows as mappings from columns to values. A function is called each time the rows are read, so it may be a
generator."""


@dataclass(frozen=True)
class RowsFromPython:
    """Training and evaluation rows passed by the program."""

    train: PythonRows | None = None
    eval: PythonRows | None = None


NO_ROWS = RowsFromPython()


def take_rows(config: TrainingConfig, given: RowsFromPython) -> tuple[TrainingConfig, RowsFromPython]:
    """The config with the rows' source and digest filled in, and the rows in a form that can be read repeatedly.

    Rows are held in a list, except for training rows with `data.streaming`, which have no digest. Raises RequestError
    if config and rows contradict each other.
    """
    problems: list[Problem] = []
    train = _taken(config.data.train, "data.train", given.train, config.data.streaming, problems)
    held_out = _taken(config.data.eval, "data.eval", given.eval, False, problems)
    if problems:
        raise RequestError(problems)
    data = config.data.model_copy(update={"train": train[0], "eval": held_out[0]})
    return config.model_copy(update={"data": data}), RowsFromPython(train[1], held_out[1])


def python_records(rows: PythonRows) -> Iterator[Record]:
    """The program's rows, numbered from 1."""
    for number, row in enumerate(rows() if callable(rows) else rows, 1):
        fault = Fault(f"expected a mapping of columns, not {type(row).__name__}")
        yield number, dict(row) if isinstance(row, Mapping) else fault


def _taken(
    sources: Datasets, key: str, rows: PythonRows | None, is_streamed: bool, problems: list[Problem]
) -> tuple[Datasets, PythonRows | None]:
    """The sources with the digest filled in, and the rows."""
    if rows is None:
        return sources, None
    sources = sources or (DatasetParams(path=PYTHON_ROWS),)
    places = [index for index, source in enumerate(sources) if source.path == PYTHON_ROWS]
    if len(places) != 1:
        found = f"{len(places)} sources are" if places else "no source is"
        message = f"rows are given from Python, and {found} {PYTHON_ROWS}"
        problems.append(Problem(key, message, expected=f"one source {{path: {PYTHON_ROWS}}}"))
        return sources, None
    if is_streamed:
        if isinstance(rows, Iterator):
            message = "a stream may be read several times, and these rows can be iterated only once"
            problems.append(Problem(key, message, expected="the function that makes the iterator"))
        return sources, rows
    held = list(rows() if callable(rows) else rows)
    index, found = places[0], digest(held)
    if sources[index].digest not in (None, found):
        message = f"the rows differ from those that were recorded: their digest is {found}"
        problems.append(Problem(f"{key}[{index}].digest", message, expected=f"{sources[index].digest}"))
    named = sources[index].model_copy(update={"digest": found})
    return (*sources[:index], named, *sources[index + 1 :]), held


def digest(rows: Iterable[Any]) -> str:
    """Digest of the rows: SHA-256 over each as JSON, in order; values that JSON cannot represent enter as printed."""
    found = hashlib.sha256()
    for row in rows:
        document = dict(row) if isinstance(row, Mapping) else row
        found.update(json.dumps(document, sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()[:32]

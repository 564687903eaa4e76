"""Data files, read row by row: JSONL, JSON, CSV, Parquet and plain text, each fault with its place."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from framework.build.hub import one_line


@dataclass(frozen=True)
class Fault:
    """Why a row of a file cannot be read."""

    message: str


Record: TypeAlias = tuple[int, dict[str, Any] | Fault]
"""The row's number in its file (the line, where a file has lines; from 1), and its columns or what is wrong with it."""

CSV_FIELD_LIMIT = 2**31 - 1
"""Characters in one field. Python's own limit of 131072 is there for parsing untrusted uploads."""

PARQUET_BATCH = 1000
"""Rows decoded at a time: enough to amortise the call, few enough that long rows stay small beside the file."""


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object a line; blank lines are no rows."""
    for number, line in _lines(path):
        if isinstance(line, Fault):
            yield number, line
        elif line.strip():
            yield number, _parse_object(line)


def read_json(path: Path) -> Iterator[Record]:
    """An array of objects, one object, or JSONL under another name. The whole file is held in memory."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_jsonl(path)
        elif error.doc.strip():
            yield error.lineno, Fault(f"not JSON: {error.msg} at column {error.colno}")
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        yield 1, Fault(f"not JSON: {one_line(error)}")
    else:
        rows = value if isinstance(value, list) else [value]
        yield from ((number, _as_object(row)) for number, row in enumerate(rows, 1))


def read_csv(path: Path) -> Iterator[Record]:
    """One row a record under a header line; every value is text. `.tsv` is separated by tabs."""
    csv.field_size_limit(CSV_FIELD_LIMIT)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        try:
            for values in reader:
                if not values:
                    continue
                if not header:
                    header = values
                    if len(set(header)) < len(header):
                        yield reader.line_num, Fault(f"the header names a column twice: {', '.join(header)}")
                        return
                elif len(values) != len(header):
                    yield reader.line_num, Fault(f"{len(values)} fields, but the header has {len(header)}")
                else:
                    yield reader.line_num, dict(zip(header, values, strict=True))
        except csv.Error as error:
            yield reader.line_num, Fault(f"not CSV: {error}")
        except UnicodeDecodeError as error:
            yield reader.line_num + 1, Fault(f"at or after this line: {_not_utf8(error)}")


def read_parquet(path: Path) -> Iterator[Record]:
    """One row a row."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pa.ArrowException, OSError) as error:
        yield number + 1, Fault(f"not Parquet: {one_line(error)}")


def read_text(path: Path) -> Iterator[Record]:
    """One row a line, as the `text` loader of Hugging Face datasets reads it; blank lines are no rows."""
    for number, line in _lines(path):
        if isinstance(line, Fault):
            yield number, line
        elif line.strip():
            yield number, {"text": line.rstrip("\r\n")}


READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_text,
}
"""How a file is read, by the ending of its name in lower case."""


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a file whose ending is one of READERS. Raises OSError when it cannot be opened."""
    return READERS[path.suffix.lower()](path)


def _lines(path: Path) -> Iterator[tuple[int, str | Fault]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, Fault(_not_utf8(error))


def _parse_object(text: str) -> dict[str, Any] | Fault:
    try:
        return _as_object(json.loads(text))
    except json.JSONDecodeError as error:
        return Fault(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Fault(f"not JSON: {one_line(error)}")


def _as_object(value: object) -> dict[str, Any] | Fault:
    return value if isinstance(value, dict) else Fault(f"expected an object {{..}}, not {type(value).__name__}")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"

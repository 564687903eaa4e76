"""Readers of data files, row by row, compressed or not: JSONL, JSON, CSV, Parquet, Arrow, text. Faults have a
location."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq

from framework.build.hub import one_line
from framework.paths import open_regular
from framework.schema.plural import counted


@dataclass(frozen=True, repr=False)
class OutOfRange:
    """Placeholder for a value that Python cannot represent: a date after the year 9999, PostgreSQL's `infinity`,
    nanoseconds. It is an error only if the column is used."""

    kind: str

    def __repr__(self) -> str:
        return f"{self.kind} out of Python's range"


def python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch, by column.

    A struct has the same fields in all rows, so a key that only some rows have is null in the others. Such keys are
    removed within columns, so a tool call has only its own arguments.
    """
    names = batch.schema.names
    columns = [without_nulls(_values(column)) if has_struct(column.type) else _values(column) for column in batch]
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def has_struct(kind: pa.DataType) -> bool:
    """Whether values of this type contain a struct."""
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return pa.types.is_struct(kind) or any(map(has_struct, inner))


def without_nulls(value: Any) -> Any:
    """The value without null fields of its structs; nulls in lists stay."""
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
    except (ValueError, OverflowError, KeyError):  # KeyError: an unknown time zone
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, KeyError):
        return OutOfRange(str(scalar.type))


@dataclass(frozen=True)
class Fault:
    """Why a row of a file cannot be read."""

    message: str


Record: TypeAlias = tuple[int, dict[str, Any] | Fault]
"""A row's number in its file (the line, if the format has lines; from 1), and its columns or its fault."""

CSV_FIELD_LIMIT = 2**31 - 1
"""Characters in one field. Python's default of 131072 is meant for untrusted uploads."""

ARROW_BATCH = 1000
"""Rows decoded at a time: enough to amortize the call, few enough to bound memory for long rows."""


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object a line; blank lines are skipped."""
    for number, line in _lines(path):
        if isinstance(line, Fault):
            yield number, line
        elif line.strip():
            yield number, _parse_object(line)


def read_json(path: Path) -> Iterator[Record]:
    """An array of objects, one object, or JSONL with this ending. The whole file is held in memory."""
    try:
        with open_bytes(path) as file:
            value = json.loads(file.read().decode("utf-8-sig"))
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
    """One row per record below a header line; every value is text. `.tsv` is separated by tabs."""
    csv.field_size_limit(CSV_FIELD_LIMIT)
    delimiter = "\t" if ending(path) == ".tsv" else ","
    with open_bytes(path) as file:
        reader = csv.reader(
            (line.decode("utf-8-sig" if not number else "utf-8") for number, line in enumerate(file)),
            delimiter=delimiter,
            strict=True,
        )
        header: list[str] = []
        try:
            for values in reader:
                if not values:
                    continue
                if not header:
                    header = values
                    if twice := _twice(header):
                        yield reader.line_num, Fault(f"the header names a column twice: {twice}")
                        return
                elif len(values) != len(header):
                    yield reader.line_num, Fault(f"{counted(len(values), 'field')}, but the header has {len(header)}")
                else:
                    yield reader.line_num, dict(zip(header, values, strict=True))
        except csv.Error as error:
            yield reader.line_num, Fault(f"not CSV: {error}")
        except UnicodeDecodeError as error:
            yield reader.line_num + 1, Fault(_not_utf8(error))


def read_parquet(path: Path) -> Iterator[Record]:
    """Rows of a Parquet file."""
    yield from _read_batches("Parquet", path, _parquet_batches)


def read_arrow(path: Path) -> Iterator[Record]:
    """Rows of an Arrow IPC file, or of the stream that `datasets` writes, memory-mapped."""
    yield from _read_batches("Arrow", path, _arrow_batches)


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield _no_rows(file.schema_arrow)
        yield from file.iter_batches(batch_size=ARROW_BATCH)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as mapped:
        try:
            reader = pa.ipc.open_file(mapped)
            batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            mapped.seek(0)
            reader = batches = pa.ipc.open_stream(mapped)
        yield _no_rows(reader.schema)
        for batch in batches:
            for start in range(0, batch.num_rows, ARROW_BATCH):
                yield batch.slice(start, ARROW_BATCH)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _read_batches(kind: str, path: Path, batches: Callable[[Path], Iterator[pa.RecordBatch]]) -> Iterator[Record]:
    """Rows of the batches, the first of which is empty and carries the schema."""
    open_regular(path).close()  # so that an unreadable file is reported as one
    number = 0
    try:
        for batch in batches(path):
            if not number and (twice := _twice(batch.schema.names)):
                yield 0, Fault(f"the schema names a column twice: {twice}")
                return
            batch.validate(full=True)  # a damaged offset could point anywhere
            for record in python_rows(batch):
                number += 1
                yield number, record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield number + 1, Fault(f"not {kind}: {one_line(error)}")


def read_text(path: Path) -> Iterator[Record]:
    """One row a line, as in the `text` loader of Hugging Face datasets; blank lines are skipped."""
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
    ".txt": read_text,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
"""Readers by file ending in lower case."""

UNCOMPRESSED = (".parquet", ".arrow")
"""Formats with internal compression; compressed files of them are not read."""


def is_read(path: Path) -> bool:
    """Whether the file's ending is supported."""
    return ending(path) in READERS and (ending(path) not in UNCOMPRESSED or ending(path) == path.suffix.lower())


def endings() -> str:
    """The supported endings, for a message."""
    around = ", ".join(COMPRESSED)
    return f"files that end in {', '.join(READERS)}, the kinds of text also compressed ({around})"


def read_records(path: Path) -> Iterator[Record]:
    """Rows of a file that `is_read`. Raises OSError if it cannot be opened."""
    return _read(READERS[ending(path)], path)


def _read(reader: Callable[[Path], Iterator[Record]], path: Path) -> Iterator[Record]:
    number = 0
    try:
        for number, record in reader(path):
            yield number, record
    except BROKEN as error:
        yield number + 1, Fault(f"the compressed data is truncated or damaged here: {one_line(error)}")


def stream_records(path: Path) -> Iterator[Record]:
    """Rows of a file without holding it as a whole: `.json` has to be JSONL."""
    return _read(_json_lines if ending(path) == ".json" else READERS[ending(path)], path)


def _json_lines(path: Path) -> Iterator[Record]:
    with open_bytes(path) as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        yield (
            0,
            Fault("an array is one JSON text, which cannot be streamed; write one object per line"),
        )
    else:
        yield from read_jsonl(path)


def _twice(names: Iterable[str]) -> str:
    return ", ".join(name for name, times in Counter(names).items() if times > 1)


def _lines(path: Path) -> Iterator[tuple[int, str | Fault]]:
    with open_bytes(path) as file:
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


def _open_zstd(path: Path) -> BinaryIO:
    """Open with Arrow's codec, since Python has its own only from 3.14 on."""
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))


_OPENERS: Mapping[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast(BinaryIO, gzip.GzipFile(path)),
    ".bz2": lambda path: cast(BinaryIO, bz2.BZ2File(path)),
    ".xz": lambda path: cast(BinaryIO, lzma.LZMAFile(path)),  # noqa: SIM115 - the caller closes it
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPENERS)
"""Endings of compressed files, in lower case."""

BROKEN = (EOFError, zlib.error, lzma.LZMAError)
"""Exceptions for truncated or damaged compressed data, in addition to OSError."""


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, decompressed as it is read. Raises OSError; reading also one of BROKEN."""
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        return open_regular(path)
    open_regular(path).close()
    return opener(path)


def ending(path: Path) -> str:
    """The ending of the format, in lower case: `.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    last = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if last in COMPRESSED else last

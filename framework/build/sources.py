"""Where rows come from: local files, the Hugging Face hub, or the sources of Python's own standard library."""

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from framework.build.files import READERS, Fault, Record, read_records
from framework.build.forms import FORMS, Form, Values, detect_form, unknown_form
from framework.build.hub import hub_host, hub_is_reachable, nearest, one_line
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat
from framework.schema.data import DatasetParams

STANDARD_LIBRARY = "python_stdlib"
"""The path that means the embedded source."""

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
"""Folders of the standard library's folder that hold no library source."""

PROBLEM_LIMIT = 10
"""Broken rows that are listed before reading stops."""

CHUNK = 10_000
"""Rows that become one piece of the Arrow table."""

_SPLIT_WORD = re.compile(r"(?:^|[-_./])(train|validation|valid|val|dev|test|eval)(?=[-_./]|\d|$)", re.IGNORECASE)
_SPLIT_SYNONYMS = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}


@dataclass(frozen=True)
class Place:
    """Where a row stands: its file, and its line or number in it (from 1; 0 is the file as a whole)."""

    path: str
    row: int

    def __str__(self) -> str:
        return f"{self.path}:{self.row}" if self.row else self.path


@dataclass(frozen=True)
class Source:
    """The rows of one `DatasetParams`: columns `text` or `messages`, `path` and `row` (where a row stands)."""

    dataset: datasets.Dataset
    form: RowFormat
    description: str


def read_rows(sources: Sequence[DatasetParams], key: str) -> datasets.Dataset:
    """All rows of these sources, one source after the other; `key` is where they are written, such as `data.train`.

    Columns: `text` (str) or `messages` (list of role and content), or both with one of them None in each row where
    sources differ; `path` and `row`, the file and the line or row in it. Raises RequestError with every problem found.
    """
    return join_sources(read_sources(sources, key))


def join_sources(sources: Sequence[Source]) -> datasets.Dataset:
    """The rows of the sources as one dataset."""
    return datasets.concatenate_datasets([source.dataset for source in sources])


def read_sources(sources: Sequence[DatasetParams], key: str) -> list[Source]:
    """Each source by itself. Raises RequestError with the problems of all of them."""
    read: list[Source] = []
    problems: list[Problem] = []
    for index, source in enumerate(sources):
        try:
            read.append(read_source(source, f"{key}[{index}]"))
        except RequestError as error:
            problems.extend(error.problems)
    if problems:
        raise RequestError(problems)
    return read


def read_source(source: DatasetParams, key: str) -> Source:
    """One source. Raises RequestError."""
    _check_request(source, key)
    if source.path == STANDARD_LIBRARY:
        return _collect(source, key, standard_library())
    if is_local(source.path):
        return _collect(source, key, ((str(path), read_records(path)) for path in find_files(source, key)))
    return _collect(source, key, [(source.path, _hub_records(source, key))])


def is_local(path: str) -> bool:
    """Whether the path means something on this machine: it exists, or is spelled as no hub id is."""
    spelled = path.startswith((".", "/", "~")) or path.count("/") > 1 or glob.has_magic(path)
    return spelled or Path(path).suffix.lower() in READERS or Path(path).exists()


def standard_library() -> Iterator[tuple[str, Iterator[Record]]]:
    """The running Python's library sources, a file a row, by path below its folder; sorted, so always in one order.

    Tests, caches and installed packages are left out, and files that are not UTF-8.
    """
    root = Path(os.__file__).parent
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT  # never enters site-packages, which may be enormous
        found.extend(Path(folder, file).relative_to(root) for file in files if file.endswith(".py"))
    for path in sorted(found):
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield path.as_posix(), iter([(1, {"text": text})])


def find_files(source: DatasetParams, key: str) -> list[Path]:
    """The files of a path, a folder (all data files in it) or a glob; sorted. Raises RequestError when there are none.

    In a folder whose files are named for splits (`train.jsonl`, `data/test-00000.parquet`), only those of
    `source.split` are meant.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        found = _of_split([file for file in sorted(path.rglob("*")) if _is_data(file, path)], path, source.split)
        if not found:
            raise RequestError([_nothing_in(path, source, key)])
        return found
    if not path.exists() and glob.has_magic(source.path):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    else:
        found = [path] if path.exists() else []
    if not found:
        raise RequestError([_missing(path, source.path, key)])
    unread = [file for file in found if file.suffix.lower() not in READERS]
    if unread:
        message = f"{unread[0]} is of a kind that is not read (it ends in {unread[0].suffix or 'nothing'!r})"
        raise RequestError([Problem(key, message, expected=_endings())])
    return found


def _check_request(source: DatasetParams, key: str) -> None:
    problems = []
    if source.weight is not None:
        problems.append(Problem(f"{key}.weight", "mixing by weight is not yet available"))
    on_hub = source.path != STANDARD_LIBRARY and not is_local(source.path)
    if source.name is not None and not on_hub:
        problems.append(Problem(f"{key}.name", f"{source.path} is no hub dataset, so it has no configurations"))
    if source.split != "train" and not on_hub and not Path(source.path).expanduser().is_dir():
        problems.append(
            Problem(f"{key}.split", f"{source.path} is neither a folder nor on the hub, so it has no splits")
        )
    forms = sorted({column for form in FORMS.values() for column in form.columns})
    for column in source.columns:
        if column not in forms:
            message = f"there is no column {column!r} to map onto"
            problems.append(
                Problem(f"{key}.columns", message, expected=" or ".join(forms), nearest=nearest(column, forms))
            )
    if problems:
        raise RequestError(problems)


def _collect(source: DatasetParams, key: str, files: Iterable[tuple[str, Iterator[Record]]]) -> Source:
    """Read records into Arrow, each with its file and row. Unless it is set, the first record tells the form."""
    located = _located(files)
    head = list(_through_first_record(located))
    form = _find_form(source, head, key)
    table = _Table(form)
    problems: list[Problem] = []
    for place, record in chain(head, located):
        fault = record.message if isinstance(record, Fault) else table.add(_named(record, form, source), place)
        if fault is not None:
            problems.append(Problem(key, fault, where=str(place)))
        if len(problems) == PROBLEM_LIMIT:
            problems.append(Problem(key, f"reading stopped after {PROBLEM_LIMIT} broken rows"))
            break
    if problems:
        raise RequestError(problems)
    found = "as set" if source.format else "found by its column"
    return Source(table.finish(), form.name, f"{source.path}: {table.size} rows of `{form.name}` ({found})")


def _located(files: Iterable[tuple[str, Iterator[Record]]]) -> Iterator[tuple[Place, dict[str, Any] | Fault]]:
    for path, records in files:
        number = 0
        try:
            for number, record in records:
                yield Place(path, number), record
        except OSError as error:
            yield Place(path, number), Fault(f"cannot be read: {error.strerror or one_line(error)}")
            continue
        if not number:
            yield Place(path, 0), Fault("the file has no rows")


def _through_first_record(
    located: Iterator[tuple[Place, dict[str, Any] | Fault]],
) -> Iterator[tuple[Place, dict[str, Any] | Fault]]:
    for place, record in islice(located, PROBLEM_LIMIT):
        yield place, record
        if not isinstance(record, Fault):
            return


def _named(record: Mapping[str, Any], form: Form, source: DatasetParams) -> dict[str, Any]:
    """The columns that the form reads, under our names."""
    return {column: record.get(source.columns.get(column, column)) for column in form.columns}


def _find_form(source: DatasetParams, head: Sequence[tuple[Place, dict[str, Any] | Fault]], key: str) -> Form:
    """The form that is set, or that the columns of the first record show. Raises RequestError when they show none."""
    record = head[-1][1] if head else Fault("")
    if isinstance(record, Fault):
        faults = ((place, fault) for place, fault in head if isinstance(fault, Fault))
        raise RequestError([Problem(key, fault.message, where=str(place)) for place, fault in faults])
    columns = list(record)
    form = FORMS[source.format] if source.format else detect_form(columns, source.columns)
    if form is None:
        message, close = unknown_form(columns)
        raise RequestError([Problem(key, message, where=str(head[-1][0]), nearest=close)])
    absent = [name for name in (source.columns.get(column, column) for column in form.needs) if name not in columns]
    if absent:
        message = f"there is no column `{absent[0]}`; the columns are: {', '.join(columns) or 'none'}"
        raise RequestError([Problem(key, message, where=str(head[-1][0]), nearest=nearest(absent[0], columns))])
    return form


class _Table:
    """Rows on their way into Arrow. `size` counts those added."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.size = 0
        self.chunks: list[pa.Table] = []
        self.values: list[Values] = []
        self.places: list[Place] = []

    def add(self, record: Mapping[str, Any], place: Place) -> str | None:
        """Take the row, or say what is wrong with it."""
        values = self.form.read(record)
        if isinstance(values, str):
            return values
        self.size += 1
        self.values.append(values)
        self.places.append(place)
        if len(self.values) == CHUNK:
            self._flush()
        return None

    def finish(self) -> datasets.Dataset:
        self._flush()
        # The fingerprint is only for caches, which nothing here uses; datasets would hash the whole table to make one.
        return datasets.Dataset(pa.concat_tables(self.chunks), fingerprint="unused")

    def _flush(self) -> None:
        kept = pa.Table.from_pylist(self.values, schema=self.form.schema)
        kept = kept.append_column("path", pa.array([place.path for place in self.places], pa.string()))
        self.chunks.append(kept.append_column("row", pa.array([place.row for place in self.places], pa.int64())))
        self.values, self.places = [], []


def _hub_records(source: DatasetParams, key: str) -> Iterator[Record]:
    """The rows of a dataset on the hub, or of one downloaded before."""
    local = Path(source.path).absolute()
    downloaded = Path(datasets.config.HF_DATASETS_CACHE, source.path.replace("/", "___")).exists()
    if not downloaded and not hub_is_reachable():
        message = f"no file or folder {local}; {hub_host()} cannot be reached from here, and no dataset "
        message += f"{source.path!r} was downloaded before"
        raise RequestError([Problem(key, message, nearest=_nearest_path(local, source.path))])
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(source.path, source.name, split=source.split)
    except Exception as error:  # datasets and the hub client raise many kinds, all of them about the request
        message = f"no file or folder {local}; {hub_host()} answered: {one_line(error)}"
        raise RequestError([Problem(key, message, nearest=_nearest_path(local, source.path))]) from error
    wanted = {source.columns.get(column, column) for form in FORMS.values() for column in form.columns}
    # Decoding pictures or sound only to drop them would take most of the time.
    readable = [column for column in dataset.column_names if column in wanted] or dataset.column_names
    number = 0
    for batch in dataset.select_columns(readable).iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(batch, values, strict=True))


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in READERS and path.is_file() and not hidden


def _of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    named = {file: _split_named(str(file.relative_to(folder))) for file in files}
    if not any(named.values()):
        return files
    return [file for file in files if named[file] == _SPLIT_SYNONYMS.get(split, split)]


def _split_named(path: str) -> str | None:
    words = [word.lower() for word in _SPLIT_WORD.findall(path)]
    return _SPLIT_SYNONYMS.get(words[-1], words[-1]) if words else None


def _nothing_in(folder: Path, source: DatasetParams, key: str) -> Problem:
    data = [file for file in sorted(folder.rglob("*")) if _is_data(file, folder)]
    if data:
        names = ", ".join(str(file.relative_to(folder)) for file in data[:8])
        message = f"the folder {folder.absolute()} has no file for the split {source.split!r}; it has {names}"
        return Problem(f"{key}.split", message)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    message = f"the folder {folder.absolute()} has no data files; it has {found}"
    return Problem(key, message, expected=_endings())


def _missing(path: Path, written: str, key: str) -> Problem:
    what = "no file matches" if glob.has_magic(written) else "there is no file or folder"
    return Problem(
        key, f"{what} {written} (looked at {path.absolute()})", nearest=_nearest_path(path.absolute(), written)
    )


def _nearest_path(path: Path, written: str) -> str | None:
    """The path as written, with its last part replaced by the nearest name that exists there."""
    close = nearest(path.name, [*(sibling.name for sibling in path.parent.glob("*")), STANDARD_LIBRARY])
    return os.path.join(os.path.dirname(written), close) if close else None


def _endings() -> str:
    return f"files that end in {', '.join(READERS)}"

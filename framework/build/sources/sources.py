"""Sources of rows: local or remote files, the Hugging Face hub, Python rows, and Python's standard library."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyarrow as pa

from framework.build.hub import hub_host, nearest, one_line
from framework.build.sources.files import Fault, Record, is_read, read_records, stream_records, without_nulls
from framework.build.sources.find_files import (
    PYTHON_ROWS,
    STANDARD_DOCSTRINGS,
    STANDARD_LIBRARY,
    find_files,
    is_local,
    nearest_path,
    note_of,
)
from framework.build.sources.python_library import standard_docstrings, standard_library
from framework.build.sources.python_rows import PythonRows, python_records
from framework.build.sources.row_table import RowTable, joined
from framework.build.sources.row_template import RowTemplate, read_row_template
from framework.build.text.format_rows import Values
from framework.build.text.format_table import FORMATS, Format
from framework.build.text.row_formats import choose_format
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.schema.choices import RowFormat
from framework.schema.data import DatasetParams, Split, parse_split
from framework.schema.plural import counted
from framework.schema.tasks import Task
from framework.schema.urls import is_url

if TYPE_CHECKING:
    import datasets


PROBLEM_LIMIT = 10
"""Maximum number of broken rows that are listed."""

CHUNK = 10_000
"""Rows in one piece of the Arrow table."""

UNREAD = "unread"
"""Entry of a stored row with the names of its unused columns and fields."""

T = TypeVar("T")

Files: TypeAlias = Iterable[tuple[str, Iterator[Record]]]
"""Names of files and the rows of each."""


@dataclass(frozen=True)
class Place:
    """Location of a row: its file, and its line or number in it (from 1; 0 is the file as a whole)."""

    path: str
    row: int

    def __str__(self) -> str:
        return f"{self.path}:{self.row}" if self.row else self.path


@dataclass(frozen=True)
class Source:
    """The stored rows of one `DatasetParams`, with the columns `path` and `row` for their location."""

    dataset: RowTable
    row_format: RowFormat
    description: str
    unread: Mapping[str, Sequence[str]]
    """The path -> unused columns and fields of turns."""


def join_sources(sources: Sequence[Source]) -> RowTable:
    """The rows of the sources, concatenated."""
    return joined([source.dataset for source in sources])


def read_sources(
    sources: Sequence[DatasetParams], key: str, task: Task = Task.SFT, given: PythonRows | None = None
) -> list[Source]:
    """Read each source, with a row format that the task supports. Raises RequestError with the problems of all."""
    return gather(sources, lambda index, source: read_source(source, f"{key}[{index}]", task, given))


def gather(sources: Sequence[DatasetParams], read: Callable[[int, DatasetParams], T]) -> list[T]:
    """The result of `read` for each source. Raises RequestError with the problems of all."""
    made: list[T] = []
    problems: list[Problem] = []
    for index, source in enumerate(sources):
        try:
            made.append(read(index, source))
        except RequestError as error:
            problems.extend(error.problems)
    if problems:
        raise RequestError(problems)
    return made


def read_source(source: DatasetParams, key: str, task: Task = Task.SFT, given: PythonRows | None = None) -> Source:
    """Read one source. Raises RequestError."""
    return open_source(source, key, task, given).read()


@dataclass(frozen=True)
class OpenSource:
    """A source with its files and row format determined, of which only the first row has been read."""

    params: DatasetParams
    key: str
    reach: "_Reach"
    row_format: Format

    @property
    def found(self) -> str:
        """How the format was determined, for the report."""
        return "as set" if self.params.format else "found by its columns"

    def rows(self) -> Iterator[tuple[Place, Values | Fault]]:
        """Stored rows from the first on, read lazily and again with every call."""
        for place, record in self.reach.records():
            if isinstance(record, Fault):
                yield place, record
                continue
            values = self.row_format.read(self.row_format.take(record, self.params.columns))
            if isinstance(values, str):
                yield place, Fault(values)
                continue
            if unread := [*self.row_format.unread(record, self.params.columns), *self.reach.never_read]:
                values[UNREAD] = unread
            yield place, values

    def read(self, most: int | None = None) -> Source:
        """All rows, or a sample of the first `most`. Raises RequestError."""
        table = _Table(self.row_format)
        problems, unread = list[Problem](), dict[str, None]()
        for place, values in islice(self.rows(), most):
            if isinstance(values, Fault):
                problems.append(Problem(self.key, values.message, where=str(place)))
            else:
                unread |= dict.fromkeys(values.get(UNREAD, ()))
                table.add(values, place)
            if len(problems) == PROBLEM_LIMIT:
                problems.append(Problem(self.key, f"reading stopped after {PROBLEM_LIMIT} broken rows"))
                break
        if problems:
            raise RequestError(problems)
        many = f"{counted(table.size, 'row')}" if most is None else "a stream"
        found = ", ".join(filter(None, (self.found, note_of(self.params.path))))
        description = f"{self.params.path}: {many} of `{self.row_format.name}` ({found})"
        names = {self.params.path: tuple(unread)} if unread else {}
        return Source(table.finish(), self.row_format.name, description, names)


def open_source(
    source: DatasetParams,
    key: str,
    task: Task = Task.SFT,
    given: PythonRows | None = None,
    streamed: bool = False,
) -> OpenSource:
    """Find the files, and detect the row format by the first row unless it is set. Raises RequestError.

    A `streamed` source is never held as a whole, neither here nor by the hub's client.
    """
    _check_request(source, key)
    template = read_row_template(source.template, f"{key}.template")
    # the hub's client applies the slice itself, except to a stream
    split = Split("train") if _is_on_hub(source) and not streamed else parse_split(source.split)
    reach = _Reach(*_opener(source, key, given, streamed), split, template)
    head = list(_through_first_record(reach.records()))
    if not head:
        message = f"`{source.split}` has no rows: the source has {counted(reach.count, 'row')}"
        raise RequestError([Problem(f"{key}.split", message)])
    return OpenSource(source, key, reach, _find_format(source, head, key, task))


@dataclass(frozen=True)
class _Reach:
    """The records of a source within its slice; they can be read repeatedly."""

    files: Callable[[], Files]
    never_read: Sequence[str]
    """Columns that are not decoded."""
    split: Split
    template: RowTemplate | None = None

    @cached_property
    def count(self) -> int:
        """Number of records without the slice. Reads them all."""
        return sum(1 for _ in _located(self.files()))

    def records(self) -> Iterator[tuple[Place, dict[str, Any] | Fault]]:
        located = _located(self.files())
        if not self.split.is_whole:
            located = islice(located, *self.split.rows(self.count if self.split.needs_count else None))
        if (template := self.template) is None:
            return located
        return ((place, each if isinstance(each, Fault) else template.apply(each)) for place, each in located)


def _opener(
    source: DatasetParams, key: str, given: PythonRows | None, streamed: bool
) -> tuple[Callable[[], Files], Sequence[str]]:
    """A function that opens the files, and the columns that it does not decode."""
    if source.path == STANDARD_LIBRARY:
        return standard_library, ()
    if source.path == STANDARD_DOCSTRINGS:
        return standard_docstrings, ()
    if source.path == PYTHON_ROWS:
        if given is None:
            message = "these rows came from Python, and none are passed now"
            argument = "eval_rows" if key.startswith("data.eval") else "train_rows"
            raise RequestError([Problem(key, message, expected=f"framework.train(config, {argument}=...)")])
        return lambda: [(PYTHON_ROWS, python_records(given))], ()
    if is_local(source.path):
        paths = find_files(source.path, parse_split(source.split), key)
        read = stream_records if streamed else read_records
        return lambda: ((str(path), read(path)) for path in paths), ()
    dataset = _hub_dataset(source, key, streamed)
    columns = dataset.column_names or []
    if source.template is not None:  # a template may use any column
        return lambda: [(source.path, _dataset_records(dataset))], ()
    # decoding images or sound only to drop them would take most of the time
    wanted = {name for row_format in FORMATS.values() for name in row_format.names(source.columns)}
    readable = [column for column in columns if column in wanted] or list(columns)
    left = [f"`{column}`" for column in columns if column not in readable]
    kept = dataset.select_columns(readable) if left else dataset
    return lambda: [(source.path, _dataset_records(kept))], left


def _is_on_hub(source: DatasetParams) -> bool:
    return source.path not in (STANDARD_LIBRARY, STANDARD_DOCSTRINGS, PYTHON_ROWS) and not is_local(source.path)


def _check_request(source: DatasetParams, key: str) -> None:
    problems = []
    on_hub = _is_on_hub(source)
    if source.name is not None and not on_hub:
        problems.append(Problem(f"{key}.name", f"{source.path} is not a hub dataset, so it has no configurations"))
    if source.digest is not None and source.path != PYTHON_ROWS:
        problems.append(Problem(f"{key}.digest", f"is only for rows from Python ({PYTHON_ROWS})"))
    if not on_hub:
        problems.extend(_split_problems(source, f"{key}.split"))
    formats = sorted({column for row_format in FORMATS.values() for column in row_format.columns})
    for column in source.columns:
        if column not in formats:
            message = f"there is no column {column!r} to map onto"
            problems.append(
                Problem(f"{key}.columns", message, expected=" or ".join(formats), nearest=nearest(column, formats))
            )
    if problems:
        raise RequestError(problems)


def _split_problems(source: DatasetParams, key: str) -> Iterator[Problem]:
    if "+" in source.split:
        yield Problem(key, "joined splits are for the hub", expected="each of them as a separate source")
    elif is_url(source.path) and not is_read(Path(source.path)):
        return  # it may be a folder
    elif parse_split(source.split).name != "train" and not Path(source.path).expanduser().is_dir():
        message = f"{source.path} is neither a folder nor on the hub, so it has no splits"
        yield Problem(key, message, expected="train, or a slice of it such as `train[:1000]`")


def _located(files: Files) -> Iterator[tuple[Place, dict[str, Any] | Fault]]:
    for path, records in files:
        number, is_empty = 0, True
        try:
            for number, record in records:
                is_empty = False
                yield Place(path, number), record
        except OSError as error:
            yield Place(path, number), Fault(f"cannot be read: {error.strerror or one_line(error)}")
            continue
        if is_empty:
            yield Place(path, 0), Fault("the file has no rows")


def _through_first_record(
    located: Iterator[tuple[Place, dict[str, Any] | Fault]],
) -> Iterator[tuple[Place, dict[str, Any] | Fault]]:
    for place, record in islice(located, PROBLEM_LIMIT):
        yield place, record
        if not isinstance(record, Fault):
            return


def _find_format(
    source: DatasetParams, head: Sequence[tuple[Place, dict[str, Any] | Fault]], key: str, task: Task
) -> Format:
    """The format that is set, or detected from the first record. Raises RequestError if there is none."""
    record = head[-1][1] if head else Fault("")
    if isinstance(record, Fault):
        faults = ((place, fault) for place, fault in head if isinstance(fault, Fault))
        raise RequestError([Problem(key, fault.message, where=str(place)) for place, fault in faults])
    try:
        return choose_format(source, record, key, task)
    except RequestError as error:
        raise RequestError([replace(problem, where=str(head[-1][0])) for problem in error.problems]) from None


class _Table:
    """Builder of an Arrow table. `size` is the number of rows added."""

    def __init__(self, row_format: Format) -> None:
        self.row_format = row_format
        self.size = 0
        self.chunks: list[pa.Table] = []
        self.values: list[Values] = []
        self.places: list[Place] = []

    def add(self, values: Values, place: Place) -> None:
        """Add a row."""
        self.size += 1
        self.values.append(values)
        self.places.append(place)
        if len(self.values) == CHUNK:
            self._flush()

    def finish(self) -> RowTable:
        self._flush()
        return RowTable(pa.concat_tables(self.chunks))

    def _flush(self) -> None:
        kept = pa.Table.from_pylist(self.values, schema=self.row_format.schema)
        kept = kept.append_column("path", pa.array([place.path for place in self.places], pa.string()))
        self.chunks.append(kept.append_column("row", pa.array([place.row for place in self.places], pa.int64())))
        self.values, self.places = [], []


def _hub_dataset(source: DatasetParams, key: str, streamed: bool) -> "datasets.Dataset | datasets.IterableDataset":
    """A dataset of the hub, or one downloaded before. Raises RequestError."""
    import datasets  # takes seconds, with pandas

    split = source.split
    if streamed:
        taken = parse_split(split) if "+" not in split else None
        if taken is None or taken.needs_count:
            message = f"`{split}` of a stream from the hub cannot be taken without loading all of it"
            raise RequestError([Problem(f"{key}.split", message, expected="row numbers, as in `train[:1000]`")])
        split = taken.name
    local = Path(source.path).absolute()
    downloaded = Path(datasets.config.HF_DATASETS_CACHE, source.path.replace("/", "___")).exists()
    if not downloaded and not hub_is_reachable():
        message = f"no file or folder {local}; {hub_host()} cannot be reached from here, and no dataset "
        message += f"{source.path!r} was downloaded before"
        raise RequestError([Problem(key, message, nearest=nearest_path(local, source.path))])
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(
            source.path, source.name, split=split, **({"streaming": True} if streamed else {})
        )
    except Exception as error:  # datasets and the hub client raise many types, all about the request
        message = f"no file or folder {local}; {hub_host()} answered: {one_line(error)}"
        raise RequestError([Problem(key, message, nearest=nearest_path(local, source.path))]) from error
    return dataset


def _dataset_records(dataset: "datasets.Dataset | datasets.IterableDataset") -> Iterator[Record]:
    """The dataset's rows, with class names in place of indices; -1 means no class."""
    number, classes = 0, _class_names(dataset.features or {})
    for batch in dataset.iter(batch_size=1000):
        for column, names in classes.items():
            batch[column] = [_named_class(value, names) for value in batch[column]]
        batch = {column: without_nulls(values) for column, values in batch.items()}  # as in Arrow structs
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(batch, values, strict=True))


def _class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Class names of each column with classes or lists of them."""
    from datasets import ClassLabel

    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {column: feature.names for column, feature in inner.items() if isinstance(feature, ClassLabel)}


def _named_class(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_named_class(each, names) for each in value]
    return None if value is None or value < 0 else names[value]

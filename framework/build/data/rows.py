"""Tokenized rows: storage, and truncation of long ones."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict, overload

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from framework.activity import drawn_by
from framework.build.text.labels import IGNORED, Encoded
from framework.schema.choices import Truncation


class Row(TypedDict):
    """One row for a model. Labels of unsupervised tokens are `IGNORED` (-100)."""

    input_ids: list[int]
    labels: list[int]
    documents: NotRequired[list[int]]
    """Tokens of each document, if the row holds several."""
    target: NotRequired[list[float]]
    """Target of the row as a whole."""
    rejected: NotRequired["Row"]
    """The worse answer to the same prompt."""
    reference: NotRequired[float]
    """Log-probability of the supervised tokens under the reference."""


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Row]):
    """Rows concatenated in two arrays: 8 bytes a token, and cheap to pass to worker processes.

    Row i is `tokens[offsets[i]:offsets[i + 1]]`, labels alike. `tokens` and `labels` are int32 of shape (all tokens,),
    `offsets` is int64 of shape (rows + 1,).
    """

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    targets: npt.NDArray[np.float32] | None = None
    """Targets of the rows, float32 of shape (rows, numbers)."""
    rejected: "Rows | None" = None
    """The worse answers, a row for each."""
    order: npt.NDArray[np.int64] | None = None
    """Indices into the stored rows, possibly repeated; None is each once, in order."""
    reference: npt.NDArray[np.float32] | None = None
    """Precomputed log-probabilities of the rows under the reference, float32 of shape (rows,)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.order is None else len(self.order)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if self.order is not None:
            index = int(self.order[index])
        start, end = self.offsets[index], self.offsets[index + 1]
        row: Row = {"input_ids": self.tokens[start:end].tolist(), "labels": self.labels[start:end].tolist()}
        if self.targets is not None:
            row["target"] = self.targets[index].tolist()
        if self.rejected is not None:
            row["rejected"] = self.rejected[index]
        if self.reference is not None:
            row["reference"] = float(self.reference[index])
        return row

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row (of a pair, of the longer answer), shape (rows,)."""
        own = np.diff(self.offsets)
        longer = own if self.rejected is None else np.maximum(own, self.rejected.lengths)
        return longer if self.order is None else longer[self.order]


def join_rows(encoded: Sequence[Encoded]) -> Rows:
    """Encoded rows of one kind as Rows, in order."""
    if not encoded:
        return Rows(np.empty(0, np.int32), np.empty(0, np.int32), np.zeros(1, np.int64))
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(row.input_ids) for row in encoded], out=offsets[1:])
    tokens = np.concatenate([row.input_ids for row in encoded])
    targets = [row.target for row in encoded if row.target is not None]
    rejected = [row.rejected for row in encoded if row.rejected is not None]
    return Rows(
        tokens,
        np.concatenate([row.labels for row in encoded]),
        offsets,
        targets=np.stack(targets) if targets else None,
        rejected=join_rows(rejected) if rejected else None,
    )


def supervised_count(row: Encoded) -> int:
    """Supervised tokens of the row, of both answers of a pair; 1 for a row with one label."""
    if row.parts:
        return 1
    own = int(np.count_nonzero(row.labels != IGNORED))
    if row.rejected is None:
        return own
    other = int(np.count_nonzero(row.rejected.labels != IGNORED))
    return own + other if own and other else 0


def truncate(row: Encoded, limit: int, policy: Truncation) -> Encoded | None:
    """The row with at most `limit` tokens, or None if the policy is to drop it.

    `right` cuts off the end, `left` the beginning. The policy `error` is handled by the caller.
    """
    if row_length(row) <= limit:
        return row
    if policy not in (Truncation.LEFT, Truncation.RIGHT):
        return None
    if row.rejected is not None:
        row = replace(row, rejected=truncate(row.rejected, limit, policy))
    length = len(row.input_ids)
    if length <= limit:
        return row
    if row.parts:
        return _shorter_parts(row, length - limit, policy)
    if policy is Truncation.RIGHT:
        return replace(row, input_ids=row.input_ids[:limit], labels=row.labels[:limit])
    return _starting_row(row, length - limit, length)


def _shorter_parts(row: Encoded, excess: int, policy: Truncation) -> Encoded | None:
    """The row with its texts cut, the longer one first; None if nothing would be left of one."""
    lengths = [end - start for start, end in row.parts]
    left = sum(lengths) - excess
    if left < len(lengths):
        return None
    shorter = min(min(lengths), left // len(lengths))
    kept = [left] if len(lengths) == 1 else [shorter, left - shorter]
    if lengths[0] > lengths[-1]:
        kept.reverse()
    stays = np.ones(len(row.input_ids), dtype=np.bool_)
    for (start, end), count in zip(row.parts, kept, strict=True):
        stays[slice(start + count, end) if policy is Truncation.RIGHT else slice(start, end - count)] = False
    before = np.concatenate([[0], np.cumsum(stays)])
    parts = tuple((int(before[start]), int(before[end])) for start, end in row.parts)
    return replace(row, input_ids=row.input_ids[stays], labels=row.labels[stays], parts=parts)


def row_length(row: Encoded) -> int:
    """Tokens of the row; of a pair, of the longer answer."""
    return max(len(row.input_ids), row_length(row.rejected) if row.rejected is not None else 0)


def split_document(row: Encoded, limit: int) -> Iterator[Encoded]:
    """A document as consecutive rows of at most `limit` (at least 2) tokens.

    Each row begins with the last token of the row before it, whose label is not repeated; so every token of the
    document is predicted exactly once.
    """
    yield Encoded(row.input_ids[:limit], row.labels[:limit])
    for start in range(limit - 1, len(row.input_ids) - 1, limit - 1):
        yield _starting_row(row, start, start + limit)


def _starting_row(row: Encoded, start: int, end: int) -> Encoded:
    labels = row.labels[start:end].copy()
    labels[:1] = IGNORED
    return replace(row, input_ids=row.input_ids[start:end], labels=labels)


class RowsPerSecond(ProgressColumn):
    """`12,345 rows/s`, over the last half minute."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "")


@contextlib.contextmanager
def row_progress(name: str, total: int, console: Console | None) -> Iterator[Callable[[int], None]]:
    """Progress bar; yields a function to call with the number of rows just done. Shows nothing without a terminal."""
    bar = Progress(
        TextColumn("tokenizing {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RowsPerSecond(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None or not console.is_terminal,
        transient=True,
    )
    with contextlib.nullcontext() if bar.disable else drawn_by(lambda _: None), bar:
        task = bar.add_task(name, total=total)
        yield lambda rows: bar.advance(task, rows)

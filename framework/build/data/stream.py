"""Streamed rows, read as they are needed: blocks that are shuffled, tokenized, truncated and packed separately.

A block is `data.shuffle_buffer` rows as read. Its rows and their order are a function of (seed, epoch, number of the
block), so a position in the stream is three numbers, and a resume skips earlier rows without tokenizing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, islice
from typing import Any, TypeAlias, TypeVar

import numpy as np

from framework.build.data.mixing import nothing_to_draw, shares_of
from framework.build.data.packing import Packs, pack
from framework.build.data.report import SplitReport, merged_names
from framework.build.data.rows import Row, Rows
from framework.build.data.truncation import RowCounts, RowPolicy
from framework.build.sources.files import Fault
from framework.build.sources.sources import PROBLEM_LIMIT, UNREAD, OpenSource, Place
from framework.build.text.encode import Encoding
from framework.build.text.format_rows import Values
from framework.build.text.stored_rows import encode_batch
from framework.errors import Problem, RequestError
from framework.schema.choices import Mixing

ENCODE_BATCH = 256
"""Rows tokenized in one call: enough to keep all cores of a big host busy, at little memory."""

_ORDER_STREAM = 4
"""Stream of random numbers drawn from the run's seed, next to those of data.py and packing.py."""

T = TypeVar("T")
Raw: TypeAlias = tuple[OpenSource, Place, Values | Fault]


@dataclass(frozen=True)
class Position:
    """Position in a stream: `taken` rows of a block of an epoch were used."""

    epoch: int = 0
    block: int = 0
    taken: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Block:
    """Training rows of a block with their order, and the report of the rows that it was made of."""

    rows: Rows | Packs
    order: Sequence[int]
    places: Sequence[Place]
    """Location of each row that was kept; a pack holds several."""
    report: SplitReport
    lengths: Sequence[int]
    """Tokens of each row read."""
    first_dropped: str | None

    def places_of(self, index: int) -> list[Place]:
        """Locations of the rows in one row of a batch."""
        held = self.rows.rows_of(index) if isinstance(self.rows, Packs) else [index]
        return [self.places[each] for each in held]


@dataclass(frozen=True)
class Begun:
    """A block first used by a row or step, or skipped by it because no row of the block was kept."""

    epoch: int
    number: int
    report: SplitReport
    lengths: Sequence[int]
    """Tokens of each row read."""


@dataclass(frozen=True)
class StreamedRow:
    """A row of a stream, its location, and the position after it."""

    row: Row
    places: Sequence[Place]
    after: Position
    begun: Sequence[Begun] = ()
    """The blocks that begin with it, those before it without a row among them."""


@dataclass(frozen=True)
class Stream:
    """The training rows of a run, endless, epoch after epoch."""

    sources: Sequence[OpenSource]
    encoding: Encoding
    policy: RowPolicy
    seed: int
    buffer: int
    """Rows read for a block."""
    packing: bool = False
    mixing: Mixing = Mixing.CONCATENATE

    @property
    def repeats(self) -> bool:
        """Whether each epoch has the same rows."""
        return self.mixing is Mixing.CONCATENATE

    def rows(self, start: Position) -> Iterator[StreamedRow]:
        """Rows from a position on. Raises RequestError for rows that cannot be read, and if none is kept."""
        first, taken, begun = start.block, start.taken, list[Begun]()
        for epoch in count(start.epoch):
            found = bool(first or taken)
            for number, block in enumerate(self.blocks(epoch, first), first):
                begun.append(Begun(epoch, number, block.report, block.lengths))
                for index in range(taken, len(block.order)):
                    found = True
                    row = block.order[index]
                    after = Position(epoch, number, index + 1)
                    yield StreamedRow(block.rows[row], block.places_of(row), after, tuple(begun))
                    begun.clear()
                taken = 0
            first = 0
            if not found:
                raise RequestError([Problem("data.train", "the stream ended without a row to train on")])

    def blocks(self, epoch: int, first: int = 0) -> Iterator[Block]:
        """Blocks of one epoch from number `first` on. Raises RequestError for rows that cannot be read, and for a
        source of a mixture that was read completely without a row being kept."""
        ended, kept = set[str](), set[str]()
        raw = self._mixed(epoch, ended) if not self.repeats else chain.from_iterable(map(_raw, self.sources))
        behind = islice(raw, first * self.buffer, None)
        for number, rows in enumerate(in_parts(behind, self.buffer), first):
            block = self._block(rows, epoch, number)
            keys = {id(place): source.key for source, place, _ in rows}
            kept.update(keys[id(place)] for place in block.places)
            if not first and (without := ended - kept):
                gone = [source for source in self.sources if source.key in without]
                raise RequestError([nothing_to_draw(source.key, source.params.path) for source in gone])
            yield block

    def _block(self, raw: Sequence[Raw], epoch: int, number: int) -> Block:
        row_counts, places = RowCounts(self.policy, "data.train"), list[Place]()
        problems = [
            Problem(source.key, values.message, where=str(place))
            for source, place, values in raw
            if isinstance(values, Fault)
        ]
        if problems:
            raise RequestError(problems[:PROBLEM_LIMIT])
        for part in in_parts(raw, ENCODE_BATCH):
            rows = [(place, values) for _, place, values in part if not isinstance(values, Fault)]
            encoded = encode_batch(columns_of([values for _, values in rows]), self.encoding)
            are_known = row_counts.all_are_known(encoded)
            for (place, _), row in zip(rows, encoded, strict=True):
                row_counts.take(place, row, are_known)
                places += [place] * (len(row_counts.kept) - len(places))
        if row_counts.problems:
            raise RequestError(row_counts.problems[:PROBLEM_LIMIT])
        kept, report = row_counts.finish("train")
        known = ((source, values) for source, _, values in raw if not isinstance(values, Fault))
        names = ({source.params.path: values[UNREAD]} for source, values in known if UNREAD in values)
        report = replace(report, unread=merged_names(names))
        numbers = np.random.SeedSequence([self.seed, epoch, number], spawn_key=(_ORDER_STREAM,))
        generator = np.random.Generator(np.random.Philox(numbers))
        made: Rows | Packs = kept
        if self.packing and kept:
            made = pack(kept, self.policy.limit, int(generator.integers(2**31)))
        order = generator.permutation(len(made)) if self.buffer > 1 else np.arange(len(made))
        return Block(made, order.tolist(), places, report, row_counts.lengths, row_counts.first_dropped)

    def _mixed(self, epoch: int, ended: set[str]) -> Iterator[Raw]:
        """Rows of an epoch, the source of each sampled by weight as in `datasets.interleave_datasets`. Keys of
        exhausted sources are added to `ended`."""
        generator = np.random.default_rng([self.seed, epoch])
        shares = shares_of([source.params for source in self.sources])
        readers = [_Reader(source) for source in self.sources]
        while True:
            for index in generator.choice(len(readers), size=1000, p=shares):
                row = readers[index].take()
                if readers[index].is_exhausted:
                    ended.add(self.sources[index].key)
                yield row
                exhausted = [reader.is_exhausted for reader in readers]
                if all(exhausted) if self.mixing is Mixing.ALL_EXHAUSTED else any(exhausted):
                    return


@dataclass
class _Reader:
    """A source that restarts at its end; `is_exhausted` after each of its rows was used once."""

    source: OpenSource
    is_exhausted: bool = False
    _rows: Iterator[Raw] = field(init=False)
    _next: Raw = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def take(self) -> Raw:
        row = self._next
        following = next(self._rows, None)
        if following is None:
            self.is_exhausted = True
            self._begin()
        else:
            self._next = following
        return row

    def _begin(self) -> None:
        self._rows = _raw(self.source)
        self._next = next(self._rows)  # opening the source found a first row


def _raw(source: OpenSource) -> Iterator[Raw]:
    return ((source, place, values) for place, values in source.rows())


def in_parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`; the last may be shorter."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def columns_of(rows: Sequence[Values]) -> Mapping[str, list[Any]]:
    """Rows as columns, None where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

"""Rows put together into packs of at most `model.model_max_length` tokens, by best-fit decreasing.

Each row of a pack stays a document of its own: positions restart and attention does not cross (documents.py beside).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from framework.build.data.documents import end_to_end
from framework.build.data.rows import Row, Rows

_ORDER_STREAM = 3
"""Stream of random numbers drawn from the run's seed, next to those of framework/build/data/prepare.py."""


@dataclass(frozen=True, eq=False)
class Packs(Sequence[Row]):
    """The rows in packs. Pack i holds the rows numbered `members[offsets[i]:offsets[i + 1]]`."""

    rows: Rows
    members: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return end_to_end([self.rows[member] for member in self.rows_of(index)])

    def rows_of(self, index: int) -> list[int]:
        """Numbers of the rows in one pack."""
        index = range(len(self))[index]
        members: list[int] = self.members[self.offsets[index] : self.offsets[index + 1]].tolist()
        return members

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each pack, shape (packs,)."""
        return np.add.reduceat(self.rows.lengths[self.members], self.offsets[:-1])


def pack(rows: Rows, limit: int, seed: int, among: npt.NDArray[np.int64] | None = None) -> Packs:
    """Packs of at most `limit` tokens, which no row is longer than; of the rows `among` all. A function of rows, limit
    and seed alone.

    The seed decides which of several rows of the same length goes first, so that neighbours in a file do not stay
    neighbours.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_ORDER_STREAM,))))
    shuffled = generator.permutation(np.arange(len(rows)) if among is None else among)
    longest_first = shuffled[np.argsort(-rows.lengths[shuffled], kind="stable")]
    packs = best_fit(rows.lengths, longest_first.tolist(), limit)
    offsets = np.zeros(len(packs) + 1, np.int64)
    np.cumsum([len(members) for members in packs], out=offsets[1:])
    return Packs(rows, np.fromiter(_joined(packs), np.int64, len(shuffled)), offsets)


def best_fit(lengths: npt.NDArray[np.int64], order: Sequence[int], limit: int) -> list[list[int]]:
    """Each row, in `order`, into the pack that it leaves least room in; a new pack where none has room.

    With rows from long to short at most 11/9 of the fewest packs possible (Johnson 1973). `open_with[room]` are packs
    with that much room; the bits of `rooms` say which of these lists are not empty, so that the best fit is found
    without a search.
    """
    packs: list[list[int]] = []
    open_with: list[list[int]] = [[] for _ in range(limit + 1)]
    rooms = 0
    for row in order:
        length = int(lengths[row])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = open_with[room].pop()
            rooms &= ~(1 << room) if not open_with[room] else -1
            packs[number].append(row)
        else:
            room, number = limit, len(packs)
            packs.append([row])
        if room > length:
            open_with[room - length].append(number)
            rooms |= 1 << (room - length)
    return packs


def _joined(packs: Sequence[Sequence[int]]) -> Iterator[int]:
    return (member for members in packs for member in members)

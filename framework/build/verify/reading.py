"""The result of a reader, and the table of a run's readings."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One option: the requested value (None if it is for information), the one in effect, and its source."""

    key: str
    asked: str | None
    found: str
    source: str

    @property
    def holds(self) -> bool:
        return self.asked is None or self.asked == self.found


@dataclass(frozen=True)
class FirstStep:
    """Inputs of the first optimizer step: (rows, tokens) of its micro-batches, and of the evaluation before it.

    `began` is the number of this process's first step, `number` that of the first that changed weights. `documents` are
    the tokens of each document of each row of each micro-batch, without padding. `joined` is whether the micro-batches
    mark where documents begin.
    """

    micro_batches: tuple[tuple[int, int], ...]
    eval_batches: tuple[tuple[int, int], ...] = ()
    eval_sets: int = 1
    """Named sets of rows in the evaluation."""
    began: int = 1
    number: int = 1
    documents: tuple[tuple[tuple[int, ...], ...], ...] = ()
    joined: bool = False
    has_reference: bool = False
    """Whether the micro-batches carry a reference's precomputed values."""


def table(readings: Sequence[Reading]) -> list[str]:
    """The readings as lines of aligned columns: option, asked, in effect, read from."""
    rows = [("option", "asked", "in effect", "read from")]
    rows += [(item.key, "-" if item.asked is None else item.asked, item.found, item.source) for item in readings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""What one reader found, and how a run's readings look."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One option: what was asked (None: nothing, it is said for information), what is in effect, and who said so."""

    key: str
    asked: str | None
    found: str
    source: str

    @property
    def holds(self) -> bool:
        return self.asked is None or self.asked == self.found


@dataclass(frozen=True)
class FirstStep:
    """What the first optimizer step was given: (rows, tokens) of its micro batches, and of the evaluation before it.

    `began` is the number of the first step that this process made, `number` that of the first that changed weights.
    `documents` are the tokens of each document of each row of each micro batch, padding left out. `joined` is whether
    the micro batches say where documents begin.
    """

    micro_batches: tuple[tuple[int, int], ...]
    eval_batches: tuple[tuple[int, int], ...] = ()
    eval_sets: int = 1
    """Named sets of rows that these are of."""
    began: int = 1
    number: int = 1
    documents: tuple[tuple[tuple[int, ...], ...], ...] = ()
    joined: bool = False
    has_reference: bool = False
    """Whether the micro batches carry what a reference has said of their rows."""


def table(readings: Sequence[Reading]) -> list[str]:
    """The readings as lines of aligned columns: option, asked, in effect, read from."""
    rows = [("option", "asked", "in effect", "read from")]
    rows += [(item.key, "-" if item.asked is None else item.asked, item.found, item.source) for item in readings]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

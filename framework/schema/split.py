"""`split`: a named part of a dataset, or a slice of one, spelled as Hugging Face spells it."""

import re
from dataclasses import dataclass

_PART = re.compile(
    r"(?P<name>[\w.-]+)"
    r"(?P<slice>\[(?P<first>-?\d[\d_]*)?(?P<first_share>(?<=\d)%)?:(?P<last>-?\d[\d_]*)?(?P<last_share>(?<=\d)%)?\])?"
)


@dataclass(frozen=True)
class Bound:
    """One end of a slice: a row number, negative ones from the end, or with `is_share` a percentage of the rows."""

    number: int
    is_share: bool

    @property
    def needs_count(self) -> bool:
        """Whether the number of rows has to be known to say which row is meant."""
        return self.is_share or self.number < 0

    def of(self, count: int) -> int:
        """The row that is meant among `count`, rounded and clipped as `datasets` does."""
        row = round(self.number * count / 100) if self.is_share else self.number
        return min(max(row + count, 0) if row < 0 else row, count)


@dataclass(frozen=True)
class Split:
    """`train`, `train[:1000]`, `train[10%:]`, `test[-500:]`: rows from `first` up to but not `last`, None is open."""

    name: str
    first: Bound | None = None
    last: Bound | None = None

    @property
    def is_whole(self) -> bool:
        return self.first is None and self.last is None

    @property
    def needs_count(self) -> bool:
        """Whether the rows have to be counted before the slice can be taken."""
        return any(bound is not None and bound.needs_count for bound in (self.first, self.last))

    def rows(self, count: int | None) -> tuple[int, int | None]:
        """First row and the one after the last (None: to the end); `count` may be None where it is not needed."""
        if count is None:
            return (self.first.number if self.first else 0), (self.last.number if self.last else None)
        return (self.first.of(count) if self.first else 0), (self.last.of(count) if self.last else count)


def parse_split(written: str) -> Split:
    """One split or slice. Raises ValueError for what is none."""
    found = _PART.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r} is no split; expected `train`, `train[:1000]`, `train[10%:]` or `train[-500:]`")
    ends = [
        Bound(int(found[end]), found[f"{end}_share"] is not None) if found[end] is not None else None
        for end in ("first", "last")
    ]
    return Split(found["name"], *ends)


def check_split(written: str) -> str:
    """The text itself. Raises ValueError unless it is a split, or several joined by `+`."""
    for part in written.split("+"):
        parse_split(part.strip())
    return written

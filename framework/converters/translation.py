"""What becomes of a source: the keys of ours that it fills, and what of it is left, with the reason."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from framework.compose.validation import shown
from framework.converters.source import Source


class Why(StrEnum):
    """Why a value of a source is not in the recipe."""

    ABSENT = "no equivalent"
    DEFAULT = "the default here"
    NOT_OURS = "not ours for now"
    WRITE = "write"


@dataclass(frozen=True)
class Left:
    """A value that was not carried."""

    key: str
    value: Any
    place: str
    why: Why
    text: str = ""

    def __str__(self) -> str:
        reason = f"{self.why} {self.text}" if self.why is Why.WRITE else ": ".join(filter(None, (self.why, self.text)))
        return f"{self.place}: {self.key}: {shown(self.value)}: {reason}"


@dataclass(frozen=True)
class Entry:
    """A value of the recipe, the keys it was made of, and what the reader should know of it."""

    value: Any
    of: tuple[str, ...]
    comment: str = ""


class Translation:
    """A source on its way. Tools fill it; every value of the source ends as an entry, as left, or as both."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.entries: dict[str, Entry] = {}
        self.left: list[Left] = []
        self.head: list[str] = []
        """Comments above the recipe."""
        self.preset = ""
        """The shipped model that this one is."""

    def put(self, ours: str, value: Any, *of: str, comment: str = "") -> None:
        """Our key gets a value that was made of these of theirs (those of them that are there)."""
        self.entries[ours] = Entry(value, tuple(key for key in of if key in self.source.leaves), comment)

    def carry(self, theirs: str, ours: str, change: Callable[[Any], Any] | None = None, comment: str = "") -> None:
        """Our key gets their value, changed or as it is, where there is one."""
        value = self.source.get(theirs)
        if value is not None:
            self.put(ours, change(value) if change else value, theirs, comment=comment)

    def leave(self, key: str, why: Why, text: str = "") -> None:
        """A value, or all of a section, is not carried. Nothing is said of what is not there."""
        for inner in [key, *self.source.below(key)]:
            if inner in self.source.leaves:
                value, place = self.source.leaves[inner].value, self.source.place(inner)
                self.left.append(Left(inner, value, place, why, text))

    def leave_unless_off(self, key: str, why: Why, text: str) -> None:
        """`leave`, but what is empty or off there asks for nothing."""
        value = self.source.leaves[key].value
        if value in (None, "", [], {}):
            why, text = Why.DEFAULT, "empty"
        elif value is False or value == 0:
            why, text = Why.DEFAULT, "off"
        self.leave(key, why, text)

    def is_open(self, key: str) -> bool:
        """Whether nothing has become of a key yet."""
        return not any(key in entry.of for entry in self.entries.values()) and all(key != row.key for row in self.left)

    def drop(self, ours: str, why: Why, text: str) -> None:
        """An entry is taken back, and what it was made of is left instead. Its comment goes with it."""
        for key in self.entries.pop(ours).of:
            self.leave(key, why, text)

    def has(self, ours: str, value: Any = None) -> bool:
        """Whether an entry is there, with that value if one is given."""
        return ours in self.entries and value in (None, self.entries[ours].value)

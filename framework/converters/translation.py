"""A recipe of another tool and its translation: our keys, and the values left out, with the reason."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from framework.compose.origins import Node
from framework.compose.validation import shown
from framework.errors import Problem, RequestError
from framework.schema.keys import Path, dotted
from framework.schema.params import parse_number

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MOST_REFERENCES = 8
"""Maximum depth of references; a deeper recipe refers to itself."""
LONGEST = 2**12
"""Maximum characters of a value with references; eight doublings of more would exceed memory."""
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""Booleans of YAML 1.1, which all five tools use."""


@dataclass(frozen=True)
class Leaf:
    """A scalar, or a list of scalars as one value."""

    value: Any
    line: int


class Source:
    """The values of one file by dotted key (`datasets[0].path`)."""

    def __init__(self, root: Node, label: str) -> None:
        self.label = label
        self.leaves = {dotted(path): leaf for path, leaf in _leaves(root, ())}
        self.misread: dict[str, str] = {}
        """Keys with a value of the wrong type -> the expected type."""

    def get(self, key: str) -> Any:
        """The value at a key; None if it is absent or empty. YAML 1.1's words for booleans become booleans."""
        leaf = self.leaves.get(key)
        value = None if leaf is None else self._followed(leaf.value, MOST_REFERENCES)
        return _WORDS.get(value.lower(), value) if isinstance(value, str) else value

    def text(self, key: str) -> str:
        """The value in lower case; empty if it is absent or not a text."""
        value = self.get(key)
        if isinstance(value, list | dict | int | float) and not isinstance(value, bool):
            self.misread[key] = "a word"
        return value.lower() if isinstance(value, str) else ""

    def number(self, key: str) -> float | None:
        """The value if it is a finite number in any spelling."""
        value = parse_number(self.get(key))
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        if value not in (None, False, "", [], {}):
            self.misread[key] = "a number"
        return None

    def strings(self, key: str) -> list[str]:
        """The texts of a list, or a single text in place of a list."""
        value = self.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [item for item in items if isinstance(item, str)]

    def has(self, section: str) -> bool:
        """Whether a key, or anything below it, has a value."""
        return section in self.leaves or any(self.below(section))

    def below(self, section: str) -> Iterator[str]:
        """The keys of all values inside a section or list."""
        return (key for key in self.leaves if key.startswith((f"{section}.", f"{section}[")))

    def items(self, section: str) -> list[str]:
        """The keys of the mappings in a list: `datasets[0]`, `datasets[1]`."""
        heads = (key[len(section) :].partition("]")[0] for key in self.leaves if key.startswith(f"{section}["))
        return [f"{section}{head}]" for head in dict.fromkeys(heads)]

    def place(self, key: str) -> str:
        """`file:line` of a key, or of the first value inside it."""
        found = self.leaves.get(key) or next((self.leaves[inner] for inner in self.below(key)), Leaf(None, 1))
        return f"{self.label}:{found.line}"

    def refuse(self, key: str, message: str, expected: str | None = None) -> RequestError:
        """The error for a file that cannot be converted."""
        return RequestError([Problem(key, message, self.place(key), expected)])

    def _followed(self, value: Any, left: int) -> Any:
        """The value with `${a.b}` replaced by the referenced value; a broken reference stays."""
        if isinstance(value, list):
            return [self._followed(item, left) for item in value]
        if not isinstance(value, str) or "${" not in value or left == 0:
            return value
        found = [match for match in _REFERENCE.findall(value) if match in self.leaves]
        for name in found:
            inside = self._followed(self.leaves[name].value, left - 1)
            if value == f"${{{name}}}":
                return inside
            followed = value.replace(f"${{{name}}}", "" if inside is None else str(inside))
            if len(followed) > LONGEST:
                return value
            value = followed
        return value


def _leaves(node: Node, path: Path) -> Iterator[tuple[Path, Leaf]]:
    children: list[tuple[str | int, Node]] = list((node.mapping or {}).items())
    items = node.sequence or []
    if any(item.mapping is not None or item.sequence is not None for item in items):
        children = list(enumerate(items))
    for name, child in children:
        yield from _leaves(child, (*path, name))
    if not children:
        yield path, Leaf(node.plain(), int(node.origin.where.rpartition(":")[2] or 1))


class Why(StrEnum):
    """Reason for a value that is not in the recipe."""

    ABSENT = "no equivalent"
    DEFAULT = "the default here"
    NOT_OURS = "not ours for now"
    WRITE = "write"


@dataclass(frozen=True)
class Left:
    """A value that was not converted."""

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
    """A value of the recipe, the keys that it was made of, and a comment for the reader."""

    value: Any
    of: tuple[str, ...]
    comment: str = ""


class Translation:
    """A translation in progress. Tools fill it; every value of the source becomes an entry, is left, or both."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.entries: dict[str, Entry] = {}
        self.left: list[Left] = []
        self.head: list[str] = []
        """Comments above the recipe."""
        self.preset = ""
        """The shipped model equal to this one."""

    def put(self, ours: str, value: Any, *of: str, comment: str = "") -> None:
        """Set our key to a value made of these keys of theirs (those present)."""
        self.entries[ours] = Entry(value, tuple(key for key in of if key in self.source.leaves), comment)

    def carry(self, theirs: str, ours: str, change: Callable[[Any], Any] | None = None) -> None:
        """Set our key to their value, converted or unchanged, if present."""
        value = self.source.get(theirs)
        if value is not None:
            self.put(ours, change(value) if change else value, theirs)

    def leave(self, key: str, why: Why, text: str = "") -> None:
        """Leave a value, or all of a section. Absent values are ignored."""
        for inner in [key, *self.source.below(key)]:
            if inner in self.source.leaves:
                value, place = self.source.leaves[inner].value, self.source.place(inner)
                self.left.append(Left(inner, value, place, why, text))

    def leave_unless_off(self, key: str, why: Why, text: str) -> None:
        """`leave`, but empty or disabled values are ignored."""
        value = self.source.leaves[key].value
        if value in (None, "", [], {}):
            why, text = Why.DEFAULT, "empty"
        elif value is False or value == 0:
            why, text = Why.DEFAULT, "off"
        self.leave(key, why, text)

    def is_open(self, key: str) -> bool:
        """Whether a key has no result yet."""
        return not any(key in entry.of for entry in self.entries.values()) and all(key != row.key for row in self.left)

    def drop(self, ours: str, why: Why, text: str) -> None:
        """Remove an entry with its comment, and leave the values that it was made of."""
        for key in self.entries.pop(ours).of:
            self.leave(key, why, text)

    def has(self, ours: str, value: Any = None) -> bool:
        """Whether an entry is there, with that value if one is given."""
        return ours in self.entries and value in (None, self.entries[ours].value)

"""Bounded YAML reader that keeps the line of every value.

YAML 1.2 scalars: only true and false are booleans, `1e-5` is a number, `yes`, `on` and dates are text. Size, depth and
the number of values (with aliases expanded) are limited while parsing, since an alias bomb of a few hundred bytes
expands to gigabytes in a loader that builds it.
"""

from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import yaml

from framework.compose.origins import Kind, Node, Origin
from framework.errors import Problem
from framework.paths import open_regular, path_like
from framework.schema.keys import Path, dotted
from framework.text import scalar

MAX_BYTES = 2**20
MAX_DEPTH = 24
MAX_VALUES = 3000
"""A recipe has under a hundred values; Hydra takes about 0.3 ms per value."""
MAX_PROBLEMS = 100
"""Number of problems after which reading stops: the file is not a recipe."""


class _TooMuch(Exception):
    """A limit was exceeded: the line, and the message."""


def read(path: File, label: str, kind: Kind, problems: list[Problem]) -> Node | None:
    """The mapping in a YAML file with the location of each value; None, with problems added, if it cannot be read.

    `label` names the file in locations (`label:line`).
    """
    text = _text(path, label, problems)
    if text is None:
        return None
    builder = _Builder(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), label, kind, problems)
    try:
        return builder.document()
    except _TooMuch as stop:
        line, message = stop.args
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, message = mark.line + 1 if mark else 1, f"this is not YAML: {error.problem or error.context}"
    except yaml.reader.ReaderError as error:
        line, message = text.count("\n", 0, error.position) + 1, f"this is not YAML: {error.reason}"
    problems.append(Problem("", message, f"{label}:{line}"))
    return None


def _text(path: File, label: str, problems: list[Problem]) -> str | None:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        nearest = None if path.exists() else path_like(path, File.is_file)
        problems.append(Problem("", f"cannot be read: {error.strerror} ({path.absolute()})", label, nearest=nearest))
        return None
    if len(data) > MAX_BYTES:
        problems.append(Problem("", f"is larger than {MAX_BYTES} bytes", f"{label}:1", "a recipe in YAML"))
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(Problem("", f"byte 0x{data[error.start]:02x} is not UTF-8", f"{label}:{line}", "UTF-8 text"))
        return None


class _Builder:
    """Builder of nodes from parser events, with a count of values."""

    def __init__(self, events: Iterator[Any], label: str, kind: Kind, problems: list[Problem]) -> None:
        self.events, self.label, self.kind, self.problems = events, label, kind, problems
        self.values = 0
        self.anchors: dict[str, tuple[Node, int]] = {}

    def document(self) -> Node | None:
        """The single mapping of the file."""
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise _TooMuch(1, "the file is empty")
        event = next(self.events)
        line = event.start_mark.line + 1
        if not isinstance(event, yaml.MappingStartEvent):
            raise _TooMuch(line, "the file must hold a mapping of sections, such as `training:`")
        node = self.node(event, ())
        next(self.events)
        if not isinstance(following := next(self.events), yaml.StreamEndEvent):
            raise _TooMuch(following.start_mark.line + 1, "the file must hold one document, and another starts here")
        return node

    def node(self, event: Any, path: Path) -> Node:
        line = event.start_mark.line + 1
        self.count(1, line)
        if len(path) > MAX_DEPTH:
            raise _TooMuch(line, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _TooMuch(line, f"`*{event.anchor}` is used before the end of its anchor")
            node, size = self.anchors[event.anchor]
            self.count(size, line)
            return node
        before = self.values
        if event.tag is not None:
            self.refuse(path, line, f"tags such as `{event.tag}` are refused: a recipe holds plain values only")
        node = Node(self.value(event, path), self.origin(line))
        if event.anchor:
            self.anchors[event.anchor] = node, self.values - before
        return node

    def value(self, event: Any, path: Path) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(inner, (*path, len(items))))
            return items
        return scalar(event.value) if event.style in (None, "") else event.value

    def mapping(self, path: Path) -> dict[str, Node]:
        children: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            name = self.node(event, (*path, "?")).value
            here = (*path, name if isinstance(name, str) else "?")
            child = self.node(next(self.events), here)
            if not isinstance(name, str):
                self.refuse(path, line, f'a key must be text; quote it: "{getattr(event, "value", "..")}"')
            elif name in children:
                self.refuse(here, line, f"is written twice, first in line {lines[name]}")
            elif name == "<<":
                self.refuse(path, line, "merge keys (`<<`) are refused: use `defaults:` to build on a preset")
            else:
                children[name], lines[name] = Node(child.value, self.origin(line)), line
        return children

    def origin(self, line: int) -> Origin:
        return Origin(self.kind, f"{self.label}:{line}")

    def count(self, values: int, line: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise _TooMuch(line, f"holds more than {MAX_VALUES} values, aliases counted in full")

    def refuse(self, path: Path, line: int, message: str) -> None:
        self.problems.append(Problem(dotted(path) or "the recipe", message, f"{self.label}:{line}"))
        if len(self.problems) > MAX_PROBLEMS:
            raise _TooMuch(line, "too many problems to continue")

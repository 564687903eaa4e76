"""Trees of written values with the origin of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from framework.schema.keys import Path

Kind = Literal["default", "group", "recipe", "command line"]


@dataclass(frozen=True)
class Origin:
    """Source of a value: the schema, a preset, the recipe's body, or the command line."""

    kind: Kind
    where: str = ""
    """`file:line` of a recipe or preset, the override on the command line, or the source of a default."""

    @property
    def place(self) -> str:
        """Location for a problem: `file:line`, `preset file:line` or `command line`."""
        return {"group": f"preset {self.where}", "recipe": self.where}.get(self.kind, self.kind)

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}" if self.kind in ("command line", "default") and self.where else self.place


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Node:
    """One written value: a scalar, a mapping of nodes or a list of nodes."""

    value: Any
    origin: Origin

    @property
    def mapping(self) -> dict[str, "Node"] | None:
        return self.value if isinstance(self.value, dict) else None

    @property
    def sequence(self) -> list["Node"] | None:
        return self.value if isinstance(self.value, list) else None

    def plain(self) -> Any:
        """The value without origins, as dicts, lists and scalars."""
        if self.mapping is not None:
            return {name: child.plain() for name, child in self.mapping.items()}
        return [item.plain() for item in self.sequence] if self.sequence is not None else self.value

    def at(self, path: Path) -> "Node | None":
        """The node at `path` below this one, or None."""
        node = self
        for part in path:
            if isinstance(part, str) and node.mapping and part in node.mapping:
                node = node.mapping[part]
            elif isinstance(part, int) and node.sequence and part < len(node.sequence):
                node = node.sequence[part]
            else:
                return None
        return node

    def without(self, path: Path) -> "Node":
        """This tree without the value at `path`."""
        if self.mapping is None or path[0] not in self.mapping:
            return self
        rest = {name: child for name, child in self.mapping.items() if name != path[0] or len(path) > 1}
        if len(path) > 1:
            rest[str(path[0])] = self.mapping[str(path[0])].without(path[1:])
        return Node(rest, self.origin)

    def replaced(self, path: Path, node: "Node") -> "Node":
        """This tree with `node` at `path`; missing mappings are created."""
        if not path:
            return node
        if isinstance(path[0], int):
            items = list(self.sequence or ())
            items[path[0]] = items[path[0]].replaced(path[1:], node)
            return Node(items, self.origin)
        inside = dict(self.mapping or {})
        inside[path[0]] = inside.get(path[0], Node({}, node.origin)).replaced(path[1:], node)
        return Node(inside, self.origin)


def node_of(value: Any, origin: Origin) -> Node:
    """A plain value as nodes with the same origin."""
    if isinstance(value, dict):
        return Node({str(name): node_of(child, origin) for name, child in value.items()}, origin)
    return Node([node_of(item, origin) for item in value] if isinstance(value, list | tuple) else value, origin)


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """All values except mappings; lists as a whole and item by item."""
    if node.mapping:
        for name, child in node.mapping.items():
            yield from leaves(child, (*path, name))
        return
    yield path, node
    for index, item in enumerate(node.sequence or ()):
        yield from leaves(item, (*path, index))

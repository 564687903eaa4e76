"""`data.eval` as a mapping of names to sources: the list of these sources, each with the name of its set."""

from framework.compose.origins import Node
from framework.schema.keys import Path

EVAL: Path = ("data", "eval")
SET = "eval_set"


def listed(node: Node) -> Node:
    """The list that a mapping of names to lists stands for; anything else as it is, to be judged as a list."""
    sets = node.mapping or {}
    if not sets or any(own.sequence is None for own in sets.values()) or "append" in sets:
        return node
    return Node([_named(source, name) for name, own in sets.items() for source in own.sequence or ()], node.origin)


def _named(source: Node, name: str) -> Node:
    inside = source.mapping
    return source if inside is None else Node({**inside, SET: Node(name, source.origin)}, source.origin)

"""Columns of a row, and fields of its turns, that its form does not read: named, so that nothing is left out unseen."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from framework.build.text.messages import SWITCHES, TEXT_FIELDS

CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Our columns that may hold turns."""

_TURN = frozenset({"from", "value", *SWITCHES})
_MESSAGE = frozenset({"role", "content", "tool_calls", "function_call", *TEXT_FIELDS, *SWITCHES})
"""Fields that are read of a turn `{from, value}` and of a message; `function_call` is refused."""


def unread_columns(record: Mapping[str, Any], read: frozenset[str]) -> list[str]:
    """The columns that are not among those that are `read`, as they are called."""
    return [] if record.keys() <= read else [f"`{name}`" for name in record if name not in read]


def unread_fields(values: Iterable[Any]) -> Iterator[str]:
    """The fields of turns in the values of such columns that are not read; those that are null say nothing."""
    for value in values:
        for turn in value if isinstance(value, list) else [value]:
            if isinstance(turn, dict) and not turn.keys() <= _MESSAGE and not turn.keys() <= _TURN:
                known = _TURN if "from" in turn else _MESSAGE
                yield from (f"`{name}` of turns" for name in turn if name not in known and turn[name] is not None)

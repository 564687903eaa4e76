"""What is counted of rows that are trained on as they are, and yet may be a mistake."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that a thought has in a message; a template is given it under the one that it reads."""

_ENDS = ("</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]")

_INLINE = re.compile(
    r"(?:<(?P<tag>think|thinking|thought|reasoning)>)?(?P<text>.*?)</(?(tag)(?P=tag)|think)>"
    r"|\[THINK\](?P<other>.*?)\[/THINK\]",
    re.DOTALL,
)
"""A thought inside an answer: of the tag that most models use the end alone is enough, as templates read it."""


class Remark(StrEnum):
    """What a row has, in words that follow `rows with`."""

    EMPTY_ANSWER = "an empty answer: only the end of the turn is supervised"
    LOST_THOUGHT = "thoughts, of earlier turns as a rule, that the chat template leaves out of the row"
    OTHER_TURN = "turns marked for training that are not the assistant's: they are not supervised"

    @property
    def least_share(self) -> float:
        """Share of the rows from which on it is a warning."""
        return 0.01 if self is Remark.EMPTY_ANSWER else 0.0


def thoughts(message: Mapping[str, Any]) -> Iterator[str]:
    """The thoughts of a message: in a field of its own, or at the beginning of its content; blank ones are none."""
    found = [message[name] for name in REASONING if message.get(name)][:1]
    has_end = any(end in message["content"] for end in _ENDS)
    if has_end and (inline := _INLINE.match(message["content"])):
        found.append(inline["text"] or inline["other"] or "")
    yield from (text.strip() for text in found if text.strip())


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether an answer says nothing: no content, no call, no thought."""
    return not (message["content"].strip() or message.get("tool_calls") or any(message.get(n) for n in REASONING))

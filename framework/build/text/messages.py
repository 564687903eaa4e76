"""Readers of messages and tools in rows, their stored form, and remarks on possible mistakes.

Tool calls, tools and reasoning have a different structure in each row, so everything that a template may use is stored
as JSON text and parsed when the row is encoded. A row with a remark is trained on, but may be a mistake.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from framework.build.hub import nearest

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Field names of reasoning in a message; a template gets it under the name that it uses."""

_ENDS = ("</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]")

_INLINE = re.compile(
    r"(?:<(?P<tag>think|thinking|thought|reasoning)>)?(?P<text>.*?)</(?(tag)(?P=tag)|think)>"
    r"|\[THINK\](?P<other>.*?)\[/THINK\]",
    re.DOTALL,
)
"""Reasoning inside an answer. For `<think>` the closing tag alone is enough, as for templates."""


class Remark(StrEnum):
    """A possible mistake in a row; the text completes a phrase that begins with `rows with`."""

    EMPTY_ANSWER = "an empty answer: only the end of the turn is supervised"
    LOST_THOUGHT = "reasoning, usually of earlier turns, that the chat template leaves out"
    LOST_CONTENT = "messages whose content the chat template does not write"
    OTHER_TURN = "turns marked for training that are not the assistant's: they are not supervised"

    @property
    def least_share(self) -> float:
        """Share of the rows above which the remark is a warning."""
        return 0.01 if self is Remark.EMPTY_ANSWER else 0.0


def thoughts(message: Mapping[str, Any]) -> Iterator[str]:
    """The message's reasoning, from its own field or the beginning of the content; blank ones are skipped."""
    found = [message[name] for name in REASONING if message.get(name)][:1]
    has_end = any(end in message["content"] for end in _ENDS)
    if has_end and (inline := _INLINE.match(message["content"])):
        found.append(inline["text"] or inline["other"] or "")
    yield from (text.strip() for text in found if text.strip())


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether an answer has no content, no call and no reasoning."""
    return not (message["content"].strip() or message.get("tool_calls") or any(message.get(n) for n in REASONING))


TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Optional text fields of a message. A template decides whether it writes them."""

SWITCHES = ("weight", "train", "training", "loss")
"""Fields that mark a turn as supervised or not: OpenAI's, Axolotl's (two), ms-swift's."""

SUPERVISED = "supervised"
"""Our field for it in a stored message; absent if the mark is missing or the default of the role."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates know. Some know others; a near miss of these is a typo, whose turns would not be supervised."""

SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""`from` of a ShareGPT turn -> role of a message."""


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Fault(ValueError):
    """A mistake in a value; the text is for the user."""


def describe(value: object) -> str:
    """A wrong value for a message: its type (if not obvious from its repr) and the beginning of its repr."""
    text, kind = repr(value), type(value)
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return f"{kind.__name__} {shown}" if kind.__module__ == "builtins" else shown


def read_text(value: object) -> str:
    """The value itself. Raises Fault if it is not a text."""
    if not isinstance(value, str):
        raise Fault(f"expected text, not {describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair, which is not a character
        raise Fault(f"{value[error.start]!a} at character {error.start + 1} is not a character") from None
    return value


def read_messages(value: object) -> list[dict[str, Any]]:
    """A list of `{role, content, ..}`, without fields that no template uses. Raises Fault."""
    if not isinstance(value, list):
        raise Fault(f"expected a list of messages, not {describe(value)}")
    return _each(value, _read_message, "message")


def read_sharegpt(value: object) -> list[dict[str, Any]]:
    """A list of `{from, value}`, or of messages, as messages. Raises Fault."""
    if not isinstance(value, list):
        raise Fault(f"expected a list of turns, not {describe(value)}")
    if any(isinstance(turn, dict) and turn.get("role") is not None for turn in value):
        return read_messages(value)
    return _each(value, _read_turn, "turn")


def read_turns(value: object) -> list[dict[str, Any]]:
    """A list of `{role, content}` or `{from, value}`, or a single one, as messages. Raises Fault."""
    turns = [value] if isinstance(value, dict) else value
    is_sharegpt = isinstance(turns, list) and any(isinstance(turn, dict) and "from" in turn for turn in turns)
    return read_sharegpt(turns) if is_sharegpt else read_messages(turns)


def read_functions(value: object) -> list[dict[str, Any]]:
    """OpenAI's older `functions` as tools. Raises Fault."""
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in read_tools(value)]


def read_history(value: object) -> list[list[str]]:
    """Earlier turns of an Alpaca row: pairs of a question and its answer. Raises Fault."""
    turns = _parsed(value, "earlier turns") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(turns, list) or not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in turns):
        raise Fault(f"expected a list of [question, answer], not {describe(value)}")
    return [[read_text(text) for text in turn] for turn in turns]


def with_system(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after a system prompt from its own column. Raises Fault if they begin with a different one."""
    if not system:
        return messages
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"].strip() != system.strip():
        raise Fault("column `system`: the first message is another system prompt")
    return messages


def read_tools(value: object) -> list[dict[str, Any]]:
    """A list of tools, or its JSON text; empty if there are none. Raises Fault."""
    tools = _parsed(value, "a list of tools") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Fault(f"expected a list of tools, not {describe(value)}")
    return tools


def stored(value: object) -> str:
    """The value as JSON text. Raises Fault if JSON cannot represent it."""
    try:
        text = _JSON.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(f"has no JSON form: {error}") from None
    return read_text(text)


def _each(values: Sequence[object], read: Callable[[object], dict[str, Any]], called: str) -> list[dict[str, Any]]:
    """All values read. Raises Fault with the number of the wrong one."""
    found = []
    for number, value in enumerate(values, 1):
        try:
            found.append(read(value))
        except Fault as fault:
            raise Fault(f"{called} {number}: {fault}") from None
    return found


def _read_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Fault(f"expected {{role: .., content: ..}}, not {describe(message)}")
    if message.get("function_call") is not None:
        raise Fault("no template uses `function_call`; write tool_calls: [{function: {name: .., arguments: ..}}]")
    kept: dict[str, Any] = {"role": _role(message), "content": ""}
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        kept["tool_calls"] = _read_calls(calls)
    if message.get("content") is not None or "tool_calls" not in kept:
        kept["content"] = _content(message)
    if len(message) > 2:  # most have only role and content
        kept |= {name: _field(message, name) for name in TEXT_FIELDS if message.get(name) is not None}
        kept |= _switch(message, kept["role"])
    return kept


def _switch(turn: Mapping[str, Any], role: str) -> dict[str, bool]:
    """The turn's mark of whether it is supervised, if it differs from the default of its role."""
    marks = {name: turn[name] for name in SWITCHES if turn.get(name) is not None}
    for name, value in marks.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise Fault(f"`{name}`: expected 0 or 1, false or true, not {describe(value)}")
    if len(set(map(bool, marks.values()))) > 1:
        raise Fault(f"{' and '.join(f'`{name}`' for name in marks)} contradict each other")
    if not all(marks.values()):
        return {SUPERVISED: False}
    # OpenAI's `weight` is for the assistant's turns, and 1 is its default; the others ask for any turn.
    return {SUPERVISED: True} if role != "assistant" and marks.keys() - {"weight"} else {}


def _role(message: Mapping[str, Any]) -> str:
    role = _field(message, "role")
    close = None if role in ROLES else nearest(role.strip().lower(), ROLES)
    if close is not None:
        raise Fault(f"the role is {role!r}; did you mean {close}?")
    return role


def _content(message: Mapping[str, Any]) -> str:
    """A text, or the texts of a list of parts, concatenated as templates do."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return _field(message, "content")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Fault(f"`content`: expected text or parts {{type: text, text: ..}}, not {describe(part)}")
    return "".join(_field(part, "text") for part in parts)


def _field(message: Mapping[str, Any], name: str) -> str:
    if name not in message:
        raise Fault(f"there is no `{name}`")
    try:
        return read_text(message[name])
    except Fault as fault:
        raise Fault(f"`{name}`: {fault}") from None


def _read_calls(calls: object) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI's are JSON text, which templates would quote again."""
    if not isinstance(calls, list):
        raise Fault(f"`tool_calls`: expected a list, not {describe(calls)}")
    found = []
    for number, call in enumerate(calls, 1):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise Fault(f"`tool_calls`: call {number}: expected {{function: {{name: .., arguments: ..}}}}")
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"the arguments of call {number}") if arguments.strip() else {}
        inner = {**inner, "arguments": {} if arguments is None else arguments}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


def _read_turn(turn: object) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Fault(f"expected {{from: .., value: ..}}, not {describe(turn)}")
    who, value = _field(turn, "from"), _field(turn, "value")
    if who not in SHAREGPT_ROLES:
        raise Fault(f"`from`: {who!r} is not a known role; known are {', '.join(SHAREGPT_ROLES)}")
    role = SHAREGPT_ROLES[who]
    if who != "function_call":
        return {"role": role, "content": value, **_switch(turn, role)}
    call = _parsed(value, "a function call")
    calls = call if isinstance(call, list) else [call]
    return {"role": role, "content": "", "tool_calls": _read_calls(calls), **_switch(turn, role)}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"{what}: not JSON: {error}") from None


def shared_messages(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of common messages at the beginning; at least one message of each conversation remains."""
    most = min(len(first), len(second)) - 1
    return next((index for index in range(most) if first[index] != second[index]), max(most, 0))

"""The forms that rows come in: how each is recognised by its columns, and what a value of it must be."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from framework.build.hub import nearest
from framework.schema.choices import RowFormat

ARROW_TYPES: Mapping[RowFormat, pa.DataType] = {
    RowFormat.TEXT: pa.string(),
    RowFormat.MESSAGES: pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
}
"""How the one column of each form is held. The column has the form's name."""

NOT_YET: Mapping[str, str] = {
    "input_ids": "pre-tokenised rows",
    "conversations": "ShareGPT conversations",
    "chosen": "preference pairs",
    "instruction": "instruction and output",
    "completion": "prompt and completion",
    "label": "class labels",
}
"""Columns by which forms are known that later versions read."""

UNREAD_MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking", "reasoning")
"""Fields of a message that change what a template writes, and that are not read yet: refused, never dropped."""


def detect_form(columns: Sequence[str], mapping: Mapping[str, str]) -> RowFormat | None:
    """The form of rows with these columns, after renaming; `messages` where there is also `text`."""
    if mapping.get("input_ids", "input_ids") in columns:
        return None  # a text beside the ids is only their source; reading it would throw hand-made labels away (D05)
    for form in (RowFormat.MESSAGES, RowFormat.TEXT):
        if mapping.get(form.value, form.value) in columns:
            return form
    return None


def unknown_form(columns: Sequence[str]) -> tuple[str, str | None]:
    """Why rows with these columns cannot be read, and the nearest thing that can."""
    for column, form in NOT_YET.items():
        if column in columns:
            return f"rows with a column `{column}` ({form}) are not yet available", None
    close = nearest("text", columns) or (columns[0] if len(columns) == 1 else None)
    found = ", ".join(columns) or "none"
    return f"no column `text` or `messages`; the columns are: {found}", f"columns: {{text: {close}}}" if close else None


def value_fault(form: RowFormat, value: object) -> str | None:
    """What is wrong with a value of this form, or None. A missing value is not wrong; such rows are dropped later."""
    if value is None:
        return None
    if form is RowFormat.TEXT:
        return _text_fault(value)
    if not isinstance(value, list):
        return f"expected a list of messages, not {describe(value)}"
    for number, message in enumerate(value, 1):
        if fault := _message_fault(message):
            return f"message {number}: {fault}"
    return None


def keep_form(form: RowFormat, value: Any) -> Any:
    """The value with nothing in it but what the form has."""
    if form is RowFormat.TEXT or value is None:
        return value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def describe(value: object) -> str:
    """A wrong value in few words: its type and how it begins."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _message_fault(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"expected {{role: .., content: ..}}, not {describe(message)}"
    unread = [field for field in UNREAD_MESSAGE_FIELDS if message.get(field) is not None]
    if unread:
        return f"messages with `{unread[0]}` are not yet available"
    for field in ("role", "content"):
        if field not in message:
            return f"there is no `{field}`"
        if fault := _text_fault(message[field]):
            return f"`{field}`: {fault}"
    return None


def _text_fault(value: object) -> str | None:
    if not isinstance(value, str):
        return f"expected text, not {describe(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        return f"{value[error.start]!a} at character {error.start + 1} is not a character"
    return None

"""The forms that rows come in: how each is recognised by its columns, and what a value of it must be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from framework.build.hub import nearest
from framework.schema.choices import RowFormat

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


Values = dict[str, Any]
"""What is kept of one row, by column."""


@dataclass(frozen=True)
class Form:
    """How rows of one form are recognised and read."""

    name: RowFormat
    needs: tuple[str, ...]
    """Columns that a row of this form has, under our names; `data.train.columns` says where a file names them else."""
    also: tuple[str, ...]
    """Columns that it may have besides."""
    schema: pa.Schema
    """The columns that are kept."""
    read: Callable[[Mapping[str, Any]], Values | str]
    """The needed and further columns of a record (None where absent) -> what is kept, or what is wrong.

    A missing value is not wrong: such rows are counted as empty and dropped."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needs, *self.also)


def detect_form(columns: Sequence[str], mapping: Mapping[str, str]) -> Form | None:
    """The first form whose needed columns are all there, after renaming."""
    if mapping.get("input_ids", "input_ids") in columns:
        return None  # a text beside the ids is only their source; reading it would throw hand-made labels away (D05)
    for form in FORMS.values():
        if all(mapping.get(column, column) in columns for column in form.needs):
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


def _read_text(record: Mapping[str, Any]) -> Values | str:
    text = record["text"]
    fault = None if text is None else text_fault(text)
    return f"column `text`: {fault}" if fault else {"text": text}


def _read_messages(record: Mapping[str, Any]) -> Values | str:
    messages = record["messages"]
    if messages is None:
        return {"messages": None}
    fault = messages_fault(messages)
    if fault:
        return f"column `messages`: {fault}"
    return {"messages": [{"role": message["role"], "content": message["content"]} for message in messages]}


def messages_fault(value: object) -> str | None:
    """What is wrong with a conversation, or None."""
    if not isinstance(value, list):
        return f"expected a list of messages, not {describe(value)}"
    for number, message in enumerate(value, 1):
        if fault := _message_fault(message):
            return f"message {number}: {fault}"
    return None


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
        if fault := text_fault(message[field]):
            return f"`{field}`: {fault}"
    return None


def text_fault(value: object) -> str | None:
    """What is wrong with a text, or None."""
    if not isinstance(value, str):
        return f"expected text, not {describe(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        return f"{value[error.start]!a} at character {error.start + 1} is not a character"
    return None


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""How a conversation is held."""

FORMS: Mapping[RowFormat, Form] = {
    RowFormat.MESSAGES: Form(
        RowFormat.MESSAGES, ("messages",), (), pa.schema([("messages", MESSAGES)]), _read_messages
    ),
    RowFormat.TEXT: Form(RowFormat.TEXT, ("text",), (), pa.schema([("text", pa.string())]), _read_text),
}
"""Every form, in the order in which it is looked for: `messages` where there is also `text`."""

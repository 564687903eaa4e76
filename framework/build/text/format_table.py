"""Table of row formats: for each its columns, the stored columns, and the functions that read and encode a row."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from framework.build.text import encode
from framework.build.text.chat import Chat
from framework.build.text.encode import Encoding, Result, StoredRow
from framework.build.text.format_rows import (
    Values,
    alpaca_row,
    faults_as_values,
    labelled_row,
    messages_row,
    preference_row,
    prompt_completion_row,
    sharegpt_row,
    text_row,
    tokens_row,
    unpaired_row,
)
from framework.build.text.messages import SWITCHES, TEXT_FIELDS
from framework.schema.choices import RowFormat, Supervise
from framework.schema.tasks import Task, tasks_with


@dataclass(frozen=True)
class Format:
    """A row format: how its rows are recognized, read and encoded."""

    name: RowFormat
    needs: tuple[str, ...]
    """Required columns, under our names; `data.train.columns` maps them to a file's names."""
    also: tuple[str, ...]
    """Optional columns."""
    schema: pa.Schema
    """The stored columns. `form` is the format's name."""
    read: Callable[[Mapping[str, Any]], Values | str]
    """A record's required and optional columns (None where absent) -> the stored row, or a message about a mistake.

    Missing values are no mistake: such rows are counted as empty and dropped."""
    tasks: tuple[Task, ...]
    """Tasks that train on such rows."""
    supervise: tuple[Supervise, ...]
    """Accepted values of `data.supervise`; unset always is."""
    refusal: str
    """Why other values are refused: the predicate of a message that begins with the value."""
    filled: tuple[str, ...]
    """Stored columns without which a row is empty."""
    encode: Callable[[Sequence[StoredRow], Encoding], list[Result]]
    """Tokens of rows that are not empty."""
    question: Callable[[StoredRow, PreTrainedTokenizerBase], Chat | str | Sequence[int] | None]
    """The prompt for generation, without the answer; None where the row has none."""
    prompt: Callable[[StoredRow, PreTrainedTokenizerBase], Chat | tuple[str, str]] | None = None
    """A row as a conversation, or as prompt and completion (of a pair, with the better answer); None for formats
    without a prompt."""
    known_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our column -> other accepted names."""
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our column -> columns that are used only in rows without it."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needs, *self.also)

    def name_in(self, column: str, columns: Sequence[str], mapping: Mapping[str, str]) -> str:
        """The file's name for our `column`."""
        if column in mapping:
            return mapping[column]
        return next((name for name in (column, *self.known_as.get(column, ())) if name in columns), column)

    def names(self, mapping: Mapping[str, str]) -> set[str]:
        """All accepted names of the format's columns."""
        known = {name for column in self.columns for name in (column, *self.known_as.get(column, ()))}
        return known | {theirs for ours, theirs in mapping.items() if ours in self.columns}

    def missing(self, columns: Sequence[str], mapping: Mapping[str, str]) -> list[str]:
        """Required columns that are missing from `columns`, under the file's names."""
        names = (self.name_in(column, columns, mapping) for column in self.needs)
        return [name for name in names if name not in columns]

    def take(self, record: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
        """The record's columns that this format uses, under our names."""
        names = _names_in(self.name, tuple(record), tuple(mapping.items()))
        return {column: record.get(name) for column, name in zip(self.columns, names, strict=True)}

    def unread(self, record: Mapping[str, Any], mapping: Mapping[str, str]) -> list[str]:
        """Columns of the record, and fields of its turns, that this format does not use."""
        names = _names_in(self.name, tuple(record), tuple(mapping.items()))
        turns = (record.get(name) for column, name in zip(self.columns, names, strict=True) if column in CONVERSATIONS)
        called = dict(zip(self.columns, names, strict=True))
        unread = {
            called[other]
            for column, others in self.instead.items()
            for other in others
            if record.get(called[column]) is not None and record.get(called[other])
        }
        return [*unread_columns(record, frozenset(names) - unread), *unread_fields(turns)]


@lru_cache(maxsize=64)
def _names_in(row_format: RowFormat, columns: Sequence[str], mapping: Sequence[tuple[str, str]]) -> list[str]:
    """The file's names of the format's columns. Cached, since nearly all records have the same columns."""
    return [FORMATS[row_format].name_in(column, columns, dict(mapping)) for column in FORMATS[row_format].columns]


def _schema(*kept: str) -> pa.Schema:
    ids = pa.list_(pa.int32())
    return pa.schema(
        [(column, ids if column in ("input_ids", "labels") else pa.string()) for column in ("form", *kept)]
    )


_ON_TEXT = tasks_with(lambda facts: facts.trains_on_text)
_TURNS = (Supervise.ASSISTANT, Supervise.LAST, Supervise.ALL)
_WHOLE = "needs rows that say where the prompt ends, and these are whole conversations"

_ALL = (
    Format(
        RowFormat.TOKENS,
        needs=("input_ids",),
        also=("labels", "attention_mask"),
        schema=_schema("input_ids", "labels"),
        read=faults_as_values(tokens_row),
        tasks=_ON_TEXT,
        supervise=(),
        refusal="would override the labels of pre-tokenized rows, or that all their tokens are supervised",
        filled=("input_ids",),
        encode=encode.tokens,
        question=encode.asked_tokens,
    ),
    Format(
        RowFormat.PREFERENCE,
        needs=("chosen", "rejected"),
        also=("prompt", "instruction", "input", "system", "tools", "functions", "margin"),
        schema=_schema("prompt", "chosen", "rejected", "tools", "margin"),
        read=faults_as_values(preference_row),
        tasks=tasks_with(lambda facts: facts.compares_answers),
        supervise=(Supervise.COMPLETION,),
        refusal="does not fit pairs, whose answers are compared",
        filled=("chosen", "rejected"),
        encode=encode.preferences,
        question=encode.asked_prompt,
        prompt=partial(encode.answered, column="chosen"),
        known_as={"prompt": ("conversations", "messages")},
        instead={"prompt": ("instruction", "input")},
    ),
    Format(
        RowFormat.UNPAIRED,
        needs=("prompt", "completion", "label"),
        also=("system", "tools", "functions"),
        schema=_schema("prompt", "completion", "label", "tools"),
        read=faults_as_values(unpaired_row),
        tasks=(Task.PREFERENCE,),
        supervise=(Supervise.COMPLETION,),
        refusal="does not fit judged answers",
        filled=("prompt", "completion", "label"),
        encode=encode.unpaired,
        question=encode.asked_prompt,
        prompt=encode.answered,
    ),
    Format(
        RowFormat.MESSAGES,
        needs=("messages",),
        also=("system", "tools", "functions"),
        schema=_schema("messages", "tools"),
        read=faults_as_values(messages_row),
        tasks=_ON_TEXT,
        supervise=_TURNS,
        refusal=_WHOLE,
        filled=("messages",),
        encode=encode.conversations,
        question=encode.asked_conversation,
        prompt=encode.conversation,
    ),
    Format(
        RowFormat.SHAREGPT,
        needs=("conversations",),
        also=("system", "tools", "functions"),
        schema=_schema("messages", "tools"),
        read=faults_as_values(sharegpt_row),
        tasks=_ON_TEXT,
        supervise=_TURNS,
        refusal=_WHOLE,
        filled=("messages",),
        encode=encode.conversations,
        question=encode.asked_conversation,
        prompt=encode.conversation,
    ),
    Format(
        RowFormat.ALPACA,
        needs=("instruction", "output"),
        also=("input", "system", "history"),
        schema=_schema("prompt", "completion"),
        read=faults_as_values(alpaca_row),
        tasks=_ON_TEXT,
        supervise=tuple(Supervise),
        refusal="",
        filled=("prompt", "completion"),
        encode=encode.alpacas,
        question=encode.asked_alpaca,
        prompt=encode.alpaca,
    ),
    Format(
        RowFormat.PROMPT_COMPLETION,
        needs=("prompt", "completion"),
        also=("system", "tools", "functions"),
        schema=_schema("prompt", "completion", "tools"),
        read=faults_as_values(prompt_completion_row),
        tasks=_ON_TEXT,
        supervise=tuple(Supervise),
        refusal="",
        filled=("prompt", "completion"),
        encode=encode.completions,
        question=encode.asked_prompt,
        prompt=encode.answered,
    ),
    Format(
        RowFormat.LABELLED,
        needs=("text", "label"),
        also=("text_pair",),
        schema=_schema("text", "text_pair", "label"),
        read=faults_as_values(labelled_row),
        tasks=tasks_with(lambda facts: facts.label),
        supervise=(),
        refusal="has no effect on rows that have one label",
        filled=("text", "label"),
        encode=encode.labelled,
        question=encode.asked_prompt,
        known_as={"text": ("sentence1", "sentence"), "text_pair": ("sentence2",), "label": ("labels",)},
    ),
    Format(
        RowFormat.TEXT,
        needs=("text",),
        also=(),
        schema=_schema("text"),
        read=faults_as_values(text_row),
        tasks=_ON_TEXT,
        supervise=(Supervise.ALL,),
        refusal="needs conversations, and these rows are texts",
        filled=("text",),
        encode=encode.texts,
        question=encode.asked_text,
    ),
)

FORMATS: Mapping[RowFormat, Format] = {row_format.name: row_format for row_format in _ALL}
"""All row formats, in order of detection."""


CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Our columns that may hold turns."""

_TURN = frozenset({"from", "value", *SWITCHES})
_MESSAGE = frozenset({"role", "content", "tool_calls", "function_call", *TEXT_FIELDS, *SWITCHES})
"""Fields that are used of a turn `{from, value}` and of a message; `function_call` is refused."""


def unread_columns(record: Mapping[str, Any], read: frozenset[str]) -> list[str]:
    """The record's columns that are not in `read`, quoted for a message."""
    return [] if record.keys() <= read else [f"`{name}`" for name in record if name not in read]


def unread_fields(values: Iterable[Any]) -> Iterator[str]:
    """Unused fields of the turns in these values; null fields do not count."""
    for value in values:
        for turn in value if isinstance(value, list) else [value]:
            if isinstance(turn, dict) and not turn.keys() <= _MESSAGE and not turn.keys() <= _TURN:
                known = _TURN if "from" in turn else _MESSAGE
                yield from (f"`{name}` of turns" for name in turn if name not in known and turn[name] is not None)

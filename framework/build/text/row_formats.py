"""The forms that rows come in: how each is recognised by its columns, and what a value of it must be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from framework.build.hub import nearest
from framework.build.text.column_proposals import propose
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
from framework.build.text.task_formats import KINDS, wrong_kind
from framework.build.text.unread_columns import CONVERSATIONS, unread_columns, unread_fields
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Task
from framework.schema.data import DatasetParams


@dataclass(frozen=True)
class Form:
    """How rows of one form are recognised and read."""

    name: RowFormat
    needs: tuple[str, ...]
    """Columns that a row of this form has, under our names; `data.train.columns` says where a file names them else."""
    also: tuple[str, ...]
    """Columns that it may have besides."""
    schema: pa.Schema
    """The columns that are kept. `form` is the name; a value that is missing in all the others makes an empty row."""
    read: Callable[[Mapping[str, Any]], Values | str]
    """The needed and further columns of a record (None where absent) -> what is kept, or what is wrong.

    A missing value is not wrong: such rows are counted as empty and dropped."""
    known_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our column -> other names that it is looked for under."""
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our column -> those that are read only in a row without it."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needs, *self.also)

    def name_in(self, column: str, columns: Sequence[str], mapping: Mapping[str, str]) -> str:
        """What a file with these columns calls our `column`, or would."""
        if column in mapping:
            return mapping[column]
        return next((name for name in (column, *self.known_as.get(column, ())) if name in columns), column)

    def names(self, mapping: Mapping[str, str]) -> set[str]:
        """Every name that a file may have one of our columns under."""
        known = {name for column in self.columns for name in (column, *self.known_as.get(column, ()))}
        return known | {theirs for ours, theirs in mapping.items() if ours in self.columns}

    def missing(self, columns: Sequence[str], mapping: Mapping[str, str]) -> list[str]:
        """The needed columns that a file with these columns does not have, as it would call them."""
        names = (self.name_in(column, columns, mapping) for column in self.needs)
        return [name for name in names if name not in columns]

    def take(self, record: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
        """The columns that this form reads, under our names."""
        names = _names_in(self.name, tuple(record), tuple(mapping.items()))
        return {column: record.get(name) for column, name in zip(self.columns, names, strict=True)}

    def unread(self, record: Mapping[str, Any], mapping: Mapping[str, str]) -> list[str]:
        """Columns of the record, and fields of its turns, that this form does not read."""
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
def _names_in(form: RowFormat, columns: Sequence[str], mapping: Sequence[tuple[str, str]]) -> list[str]:
    """What a file with these columns calls each of the form's; the same for nearly all of its records."""
    return [FORMS[form].name_in(column, columns, dict(mapping)) for column in FORMS[form].columns]


def detect_form(columns: Sequence[str], mapping: Mapping[str, str], task: Task = Task.SFT) -> Form | None:
    """The first form whose needed columns are all there; first of all among those that the task learns from.

    Where there are tokens, a text beside them is only their source: reading it would throw hand-made labels away.
    """
    found = [form for form in FORMS.values() if not form.missing(columns, mapping)]
    if any(form.name is RowFormat.TOKENS for form in found):
        return FORMS[RowFormat.TOKENS]
    suited = [form for form in found if form.name in KINDS[task]]
    return next(iter([*suited, *found]), None)


def _close(form: Form, columns: Sequence[str], mapping: Mapping[str, str]) -> tuple[int, str] | None:
    """How many needed columns are there, and which others to take for those that are not, where all have a near one."""
    missing = [column for column in form.needs if form.name_in(column, columns, mapping) not in columns]
    left = [column for column in columns if column not in form.names(mapping)]
    close = {column: nearest(column, left) for column in missing}
    if not all(close.values()) or len(set(close.values())) < len(close):
        return None
    pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in close.items())
    return len(form.needs) - len(missing), f"columns: {{{pairs}}}"


def choose_form(source: DatasetParams, record: Mapping[str, Any], key: str, task: Task) -> Form:
    """The form that is set for a source whose first row is `record`, or the one that its columns show.

    Raises RequestError when there is none, when a column is absent that it needs or that was mapped, and when the task
    does not learn from such rows.
    """
    columns = list(record)
    found = ", ".join(columns) or "none"
    form = FORMS[source.format] if source.format else detect_form(columns, source.columns, task)
    absent = [name for name in dict.fromkeys(source.columns.values()) if name not in columns]
    if absent and (form is None or wrong_kind(form.name, task)):  # with those columns the form may be another
        raise RequestError([_no_column(name, columns, key) for name in absent])
    if form is None:
        message, expected, close = unknown_form(record, source.columns, task)
        raise RequestError([Problem(key, message, expected=expected, nearest=close)])
    if wrong := wrong_kind(form.name, task):
        _, _, close = unknown_form(record, source.columns, task)
        raise RequestError([Problem(key, f"{wrong}; the columns are: {found}", nearest=close)])
    problems = []
    mapped = [name for column, name in source.columns.items() if column in form.columns and name not in columns]
    for name in dict.fromkeys([*form.missing(columns, source.columns), *mapped]):
        problems.append(_no_column(name, columns, key))
    for column in source.columns:
        if column not in form.columns:
            message = f"rows of `{form.name}` have no column `{column}`; they may have {', '.join(form.columns)}"
            problems.append(Problem(f"{key}.columns", message, nearest=nearest(column, form.columns)))
    if problems:
        raise RequestError(problems)
    return form


def _no_column(name: str, columns: Sequence[str], key: str) -> Problem:
    message = f"there is no column `{name}`; the columns are: {', '.join(columns) or 'none'}"
    return Problem(key, message, nearest=nearest(name, columns))


def unknown_form(
    record: Mapping[str, Any], mapping: Mapping[str, str], task: Task = Task.SFT
) -> tuple[str, str, str | None]:
    """Why rows like this one cannot be read, what the task reads, and the nearest thing that it can."""
    columns = list(record)
    forms = [FORMS[name] for name in FORMS if name in KINDS[task]]
    message = f"the columns are: {', '.join(columns) or 'none'}; no form of rows for the task {task} has them"
    expected = "; ".join(f"{form.name} ({', '.join(form.needs)})" for form in forms)
    guesses = (guess for form in forms if (guess := _close(form, columns, mapping)))
    close = max(guesses, key=lambda guess: guess[0], default=(0, None))
    return message, expected, propose(record, task) or close[1]


def _form(
    name: RowFormat,
    needs: tuple[str, ...],
    also: tuple[str, ...],
    kept: tuple[str, ...],
    read: Callable[[Mapping[str, Any]], Values],
    instead: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    **known_as: tuple[str, ...],
) -> Form:
    ids = pa.list_(pa.int32())
    columns = [(column, ids if column in ("input_ids", "labels") else pa.string()) for column in ("form", *kept)]
    return Form(name, needs, also, pa.schema(columns), faults_as_values(read), known_as, instead)


_ALL = (
    _form(
        RowFormat.TOKENS,
        ("input_ids",),
        ("labels", "attention_mask"),
        ("input_ids", "labels"),
        tokens_row,
    ),
    _form(
        RowFormat.PREFERENCE,
        ("chosen", "rejected"),
        ("prompt", "instruction", "input", "system", "tools", "functions", "margin"),
        ("prompt", "chosen", "rejected", "tools", "margin"),
        preference_row,
        {"prompt": ("instruction", "input")},
        prompt=("conversations", "messages"),
    ),
    _form(
        RowFormat.UNPAIRED,
        ("prompt", "completion", "label"),
        ("system", "tools", "functions"),
        ("prompt", "completion", "label", "tools"),
        unpaired_row,
    ),
    _form(RowFormat.MESSAGES, ("messages",), ("system", "tools", "functions"), ("messages", "tools"), messages_row),
    _form(
        RowFormat.SHAREGPT,
        ("conversations",),
        ("system", "tools", "functions"),
        ("messages", "tools"),
        sharegpt_row,
    ),
    _form(
        RowFormat.ALPACA,
        ("instruction", "output"),
        ("input", "system", "history"),
        ("prompt", "completion"),
        alpaca_row,
    ),
    _form(
        RowFormat.PROMPT_COMPLETION,
        ("prompt", "completion"),
        ("system", "tools", "functions"),
        ("prompt", "completion", "tools"),
        prompt_completion_row,
    ),
    _form(
        RowFormat.LABELLED,
        ("text", "label"),
        ("text_pair",),
        ("text", "text_pair", "label"),
        labelled_row,
        text=("sentence1", "sentence"),
        text_pair=("sentence2",),
        label=("labels",),
    ),
    _form(RowFormat.TEXT, ("text",), (), ("text",), text_row),
)

FORMS: Mapping[RowFormat, Form] = {form.name: form for form in _ALL}
"""Every form, in the order in which it is looked for."""

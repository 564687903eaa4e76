"""The forms that rows come in: how each is recognised by its columns, and what a value of it must be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from framework.build.classes import HIGHEST
from framework.build.hub import nearest
from framework.build.kinds import KINDS, wrong_kind
from framework.build.messages import (
    Fault,
    describe,
    read_messages,
    read_sharegpt,
    read_text,
    read_tools,
    shared_messages,
    stored,
)
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Task
from framework.schema.data import DatasetParams

Values = dict[str, Any]
"""What is kept of one row, by column."""

IGNORED_LABEL = -100
"""Marks, in hand-made labels, a token that is not learnt."""

HIGHEST_ID = 2**31 - 1

T = TypeVar("T")


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


@lru_cache(maxsize=64)
def _names_in(form: RowFormat, columns: Sequence[str], mapping: Sequence[tuple[str, str]]) -> list[str]:
    """What a file with these columns calls each of the form's; the same for nearly all of its records."""
    return [FORMS[form].name_in(column, columns, dict(mapping)) for column in FORMS[form].columns]


def detect_form(columns: Sequence[str], mapping: Mapping[str, str], task: Task = Task.SFT) -> Form | None:
    """The first form whose needed columns are all there; first of all among those that the task learns from.

    Where there are tokens, a text beside them is only their source: reading it would throw hand-made labels away (D05).
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


def choose_form(source: DatasetParams, columns: Sequence[str], key: str, task: Task) -> Form:
    """The form that is set for a source with these columns, or the one that they show.

    Raises RequestError when there is none, when a column is absent that it needs or that was mapped, and when the task
    does not learn from such rows.
    """
    found = ", ".join(columns) or "none"
    form = FORMS[source.format] if source.format else detect_form(columns, source.columns, task)
    absent = [name for name in dict.fromkeys(source.columns.values()) if name not in columns]
    if absent and (form is None or wrong_kind(form.name, task)):  # with those columns the form may be another
        raise RequestError([_no_column(name, columns, key) for name in absent])
    if form is None:
        message, expected, close = unknown_form(columns, source.columns, task)
        raise RequestError([Problem(key, message, expected=expected, nearest=close)])
    if wrong := wrong_kind(form.name, task):
        _, _, close = unknown_form(columns, source.columns, task)
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
    columns: Sequence[str], mapping: Mapping[str, str], task: Task = Task.SFT
) -> tuple[str, str, str | None]:
    """Why rows with these columns cannot be read, what the task reads, and the nearest thing that it can."""
    forms = [FORMS[name] for name in FORMS if name in KINDS[task]]
    message = f"the columns are: {', '.join(columns) or 'none'}; no form of rows for the task {task} has them"
    expected = "; ".join(f"{form.name} ({', '.join(form.needs)})" for form in forms)
    guesses = (guess for form in forms if (guess := _close(form, columns, mapping)))
    close = max(guesses, key=lambda guess: guess[0], default=None)
    if close is not None:
        return message, expected, close[1]
    only = f"columns: {{text: {columns[0]}}}" if len(columns) == 1 and FORMS[RowFormat.TEXT] in forms else None
    return message, expected, only


def _reader(read: Callable[[Mapping[str, Any]], Values]) -> Callable[[Mapping[str, Any]], Values | str]:
    """Faults as values: whoever reads many rows wants all of them."""

    def guarded(record: Mapping[str, Any]) -> Values | str:
        try:
            return read(record)
        except Fault as fault:
            return str(fault)

    return guarded


def _in_column(column: str, read: Callable[[object], T], value: object) -> T:
    try:
        return read(value)
    except Fault as fault:
        raise Fault(f"column `{column}`: {fault}") from None


def _optional(column: str, read: Callable[[object], T], record: Mapping[str, Any]) -> T | None:
    return None if record[column] is None else _in_column(column, read, record[column])


def _answer(column: str, read: Callable[[object], T], record: Mapping[str, Any]) -> T | None:
    """The same of an answer in a column of its own, where the empty field of a table is none."""
    value = record[column]
    return None if isinstance(value, str) and not value.strip() else _optional(column, read, record)


def _some_text(column: str, record: Mapping[str, Any]) -> str:
    return _optional(column, read_text, record) or ""


def _text_or_messages(value: object) -> str | list[dict[str, Any]]:
    return read_messages(value) if isinstance(value, list) else read_text(value)


def _tools(record: Mapping[str, Any]) -> str | None:
    tools = _optional("tools", read_tools, record)
    return stored(tools) if tools else None


def _read_text(record: Mapping[str, Any]) -> Values:
    return {"form": str(RowFormat.TEXT), "text": _optional("text", read_text, record)}


def _read_messages(record: Mapping[str, Any]) -> Values:
    messages = _optional("messages", read_messages, record)
    return {"form": str(RowFormat.MESSAGES), "messages": stored(messages) if messages else None} | {
        "tools": _tools(record)
    }


def _read_sharegpt(record: Mapping[str, Any]) -> Values:
    turns = _optional("conversations", read_sharegpt, record)
    system = _some_text("system", record)
    if turns and system:
        turns = [{"role": "system", "content": system}, *turns]
    return {"form": str(RowFormat.SHAREGPT), "messages": stored(turns) if turns else None, "tools": _tools(record)}


def _read_prompt_completion(record: Mapping[str, Any]) -> Values:
    prompt = _optional("prompt", _text_or_messages, record)
    completion = _optional("completion", _text_or_messages, record)
    prompt, completion = _alike(prompt, completion)
    kept = {"prompt": _stored(prompt), "completion": _stored(completion), "tools": _tools(record)}
    return {"form": str(RowFormat.PROMPT_COMPLETION), **kept}


def _stored(value: object) -> str | None:
    return None if value is None else stored(value)


def _alike(prompt: Any, answer: Any) -> tuple[Any, Any]:
    """A text beside a list of messages is a message itself: what the user says, or what the assistant answers."""
    if isinstance(prompt, str) and isinstance(answer, list):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(answer, str) and isinstance(prompt, list):
        answer = [{"role": "assistant", "content": answer}]
    return prompt, answer


def _read_alpaca(record: Mapping[str, Any]) -> Values:
    instruction, output = (_optional(column, read_text, record) for column in ("instruction", "output"))
    asked = {"instruction": instruction, "input": _some_text("input", record), "system": _some_text("system", record)}
    return {
        "form": str(RowFormat.ALPACA),
        "prompt": None if instruction is None else stored(asked),
        "completion": _stored(output),
    }


def _read_preference(record: Mapping[str, Any]) -> Values:
    prompt, chosen, rejected = (
        _optional(column, _text_or_messages, record) for column in ("prompt", "chosen", "rejected")
    )
    if chosen is not None and rejected is not None:
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt, chosen, rejected = _split_texts(prompt, chosen, rejected)
        elif isinstance(chosen, list) and isinstance(rejected, list):
            prompt, chosen, rejected = _split_chats(prompt, chosen, rejected)
        else:
            raise Fault("`chosen` and `rejected` are of different kinds: one is a text, one a list of messages")
    kept = {"prompt": _stored(prompt), "chosen": _stored(chosen), "rejected": _stored(rejected)}
    margin = _answer("margin", _read_margin, record)
    return {"form": str(RowFormat.PREFERENCE), **kept, "tools": _tools(record), "margin": _stored(margin)}


def _read_margin(value: object) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and abs(float(value)) <= HIGHEST:
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise Fault(f"is {describe(value)}: expected a number, by how much the one answer is better")


def _split_texts(prompt: Any, chosen: str, rejected: str) -> tuple[Any, Any, Any]:
    """Texts without a prompt share it: up to the last turn of the assistant, or the last whole word, that both have."""
    if prompt is not None:
        return prompt, *(_alike(prompt, answer)[1] for answer in (chosen, rejected))
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = chosen[: next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))]
    turn = shared.rfind("Assistant:")
    length = turn + len("Assistant:") if turn >= 0 else len(shared[: shared.rfind(" ")]) if " " in shared else 0
    return shared[:length], chosen[length:], rejected[length:]


def _split_chats(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[Any, Any, Any]:
    """Conversations share their first messages. A prompt beside them is those messages, or stands before them."""
    length = shared_messages(chosen, rejected)
    shared = chosen[:length]
    if isinstance(prompt, str):
        said = any(message["role"] == "user" and message["content"].strip() == prompt.strip() for message in shared)
        prompt = [] if said or not prompt else [{"role": "user", "content": prompt}]
    elif prompt and shared[: len(prompt)] == prompt:
        prompt = []
    return [*(prompt or []), *shared], chosen[length:], rejected[length:]


def _read_unpaired(record: Mapping[str, Any]) -> Values:
    kept = _read_prompt_completion(record)
    good = _answer("label", _read_verdict, record)
    return {**kept, "form": str(RowFormat.UNPAIRED), "label": _stored(good)}


def _read_verdict(value: object) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, (bool, int, str)) and str(value).lower() in words:
        return words[str(value).lower()]
    raise Fault(f"expected true or false, not {describe(value)}")


def _read_labelled(record: Mapping[str, Any]) -> Values:
    label = _answer("label", _read_label, record)
    pair = _optional("text_pair", read_text, record)
    text = _optional("text", read_text, record)
    return {"form": str(RowFormat.LABELLED), "text": text, "text_pair": pair, "label": _stored(label)}


def _read_label(value: object) -> object:
    """A class (name or number), a value, or a list of them."""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, float) and not np.isfinite(part):
            raise Fault(f"expected a finite number, not {part}")
        if isinstance(part, str):
            read_text(part)
        elif not isinstance(part, (int, float)):
            raise Fault(f"expected a class name, a number, or a list of them, not {describe(part)}")
    return value


def _read_tokens(record: Mapping[str, Any]) -> Values:
    ids = _optional("input_ids", _read_ids, record)
    labels = _optional("labels", _read_ids, record)
    mask = _optional("attention_mask", _read_ids, record)
    if ids is not None:
        if len(ids) and ids.min() < 0:
            raise Fault(f"column `input_ids`: {ids.min()} is no token id")
        if labels is not None and len(labels) and (bad := labels[(labels < 0) & (labels != IGNORED_LABEL)]).size:
            raise Fault(f"column `labels`: {bad[0]} is neither a token id nor {IGNORED_LABEL}")
        for name, other in (("labels", labels), ("attention_mask", mask)):
            if other is not None and len(other) != len(ids):
                raise Fault(f"column `{name}`: {len(other)} numbers for {len(ids)} tokens")
        kept = slice(None) if mask is None else _unmasked(mask)
        ids, labels = ids[kept], None if labels is None else labels[kept]
    return {"form": str(RowFormat.TOKENS), "input_ids": ids, "labels": labels}


def _read_ids(value: object) -> npt.NDArray[np.int64]:
    if not isinstance(value, (list, np.ndarray)):
        raise Fault(f"expected a list of whole numbers, not {describe(value)}")
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.empty(0, object)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu") or any(type(each) is bool for each in value):
        odd = next((each for each in value if not isinstance(each, int) or isinstance(each, bool)), value)
        raise Fault(f"expected a list of whole numbers, not {describe(odd)} in it")
    if len(ids) and ids.max() > HIGHEST_ID:
        raise Fault(f"{ids.max()} is no token id")
    return ids.astype(np.int64)


def _unmasked(mask: npt.NDArray[np.int64]) -> slice:
    """The tokens that are attended to: padding at either end is left out."""
    (attended,) = np.nonzero(mask)
    if not len(attended):
        return slice(0, 0)
    start, end = int(attended[0]), int(attended[-1]) + 1
    if end - start != len(attended):
        raise Fault("column `attention_mask`: tokens between others are masked, which training would not repeat")
    return slice(start, end)


def _form(
    name: RowFormat,
    needs: tuple[str, ...],
    also: tuple[str, ...],
    kept: tuple[str, ...],
    read: Callable[[Mapping[str, Any]], Values],
    **known_as: tuple[str, ...],
) -> Form:
    ids = pa.list_(pa.int32())
    columns = [(column, ids if column in ("input_ids", "labels") else pa.string()) for column in ("form", *kept)]
    return Form(name, needs, also, pa.schema(columns), _reader(read), known_as)


_ALL = (
    _form(
        RowFormat.TOKENS,
        ("input_ids",),
        ("labels", "attention_mask"),
        ("input_ids", "labels"),
        _read_tokens,
    ),
    _form(
        RowFormat.PREFERENCE,
        ("chosen", "rejected"),
        ("prompt", "tools", "margin"),
        ("prompt", "chosen", "rejected", "tools", "margin"),
        _read_preference,
    ),
    _form(
        RowFormat.UNPAIRED,
        ("prompt", "completion", "label"),
        ("tools",),
        ("prompt", "completion", "label", "tools"),
        _read_unpaired,
    ),
    _form(RowFormat.MESSAGES, ("messages",), ("tools",), ("messages", "tools"), _read_messages),
    _form(RowFormat.SHAREGPT, ("conversations",), ("system", "tools"), ("messages", "tools"), _read_sharegpt),
    _form(RowFormat.ALPACA, ("instruction", "output"), ("input", "system"), ("prompt", "completion"), _read_alpaca),
    _form(
        RowFormat.PROMPT_COMPLETION,
        ("prompt", "completion"),
        ("tools",),
        ("prompt", "completion", "tools"),
        _read_prompt_completion,
    ),
    _form(
        RowFormat.LABELLED,
        ("text", "label"),
        ("text_pair",),
        ("text", "text_pair", "label"),
        _read_labelled,
        text=("sentence1", "sentence"),
        text_pair=("sentence2",),
        label=("labels",),
    ),
    _form(RowFormat.TEXT, ("text",), (), ("text",), _read_text),
)

FORMS: Mapping[RowFormat, Form] = {form.name: form for form in _ALL}
"""Every form, in the order in which it is looked for."""

"""Which format rows are in, told by their columns; and what to write where they are in none."""

from collections.abc import Mapping, Sequence
from typing import Any

from framework.build.hub import nearest
from framework.build.text.column_proposals import propose
from framework.build.text.format_table import FORMS, Form
from framework.build.text.task_formats import KINDS, wrong_kind
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Task
from framework.schema.data import DatasetParams


def detect_form(columns: Sequence[str], mapping: Mapping[str, str], task: Task = Task.SFT) -> Form | None:
    """The first form whose needed columns are all there; first of all among those that the task learns from.

    Where there are tokens, a text next to them is only their source: reading it would throw hand-made labels away.
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

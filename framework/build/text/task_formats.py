"""Which forms of rows a task learns from."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from framework.build.text.format_table import FORMS
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Supervise, Task
from framework.schema.training import TrainingParams

KINDS: Mapping[Task, Sequence[RowFormat]] = {
    task: [name for name, form in FORMS.items() if task in form.tasks] for task in Task
}


class Described(Protocol):
    """Rows of one form, with a line about them."""

    @property
    def form(self) -> RowFormat: ...
    @property
    def description(self) -> str: ...


def tasks_for(form: RowFormat) -> tuple[Task, ...]:
    """The tasks that learn from rows of this form."""
    return FORMS[form].tasks


def wrong_kind(form: RowFormat, task: Task) -> str | None:
    """Why the task cannot learn from rows of this form, or None where it can."""
    if form in KINDS[task]:
        return None
    return f"rows of `{form}` are for the task {' or '.join(tasks_for(form))}, and the task is {task}"


def require_answers(training: TrainingParams, sources: Sequence[Described]) -> None:
    """Raises RequestError where a preference's loss is for pairs and rows are single answers, or the reverse."""
    if training.task is not Task.PREFERENCE:
        return
    wanted = RowFormat.PREFERENCE if training.has_pairs else RowFormat.UNPAIRED
    loss, key = training.preference.loss_type, "training.preference.loss_type"
    expected = "kto" if training.has_pairs else "dpo, ipo, orpo or simpo"
    for source in sources:
        if source.form is not wanted:
            message = f"{loss} learns from `{wanted}` rows: {source.description}"
            raise RequestError([Problem(key, message, expected=f"{expected}, or rows of `{wanted}`")])


def require_learnable(supervise: Supervise | None, sources: Sequence[Described]) -> None:
    """Raises RequestError where there are rows of a form for which `data.supervise` cannot be what it is."""
    for source in sources:
        if supervise is None or supervise in FORMS[source.form].supervise:
            continue
        works = " or ".join(FORMS[source.form].supervise)
        expected = f"{works}, or nothing" if works else "nothing"
        message = f"`{supervise}` {FORMS[source.form].refusal}: {source.description}"
        raise RequestError([Problem("data.supervise", message, expected=expected)])

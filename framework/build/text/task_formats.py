"""Which forms of rows a task learns from."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Supervise, Task
from framework.schema.training import TrainingParams

WRITING = (
    RowFormat.TEXT,
    RowFormat.MESSAGES,
    RowFormat.SHAREGPT,
    RowFormat.PROMPT_COMPLETION,
    RowFormat.ALPACA,
    RowFormat.TOKENS,
)
"""Rows to be continued as they are."""

PROMPTLESS = (RowFormat.TEXT, RowFormat.LABELLED, RowFormat.TOKENS)
"""Rows in which nothing is asked and nothing answered."""

SUPERVISED: Mapping[RowFormat, Sequence[Supervise]] = {
    RowFormat.TEXT: (Supervise.ALL,),
    RowFormat.MESSAGES: (Supervise.ASSISTANT, Supervise.LAST, Supervise.ALL),
    RowFormat.SHAREGPT: (Supervise.ASSISTANT, Supervise.LAST, Supervise.ALL),
    RowFormat.ALPACA: tuple(Supervise),
    RowFormat.PROMPT_COMPLETION: tuple(Supervise),
    RowFormat.PREFERENCE: (Supervise.COMPLETION,),
    RowFormat.UNPAIRED: (Supervise.COMPLETION,),
    RowFormat.LABELLED: (),
    RowFormat.TOKENS: (),
}
"""What `data.supervise` may be for each form, if it is set at all."""

KINDS: Mapping[Task, Sequence[RowFormat]] = {
    Task.SFT: WRITING,
    Task.PRETRAIN: WRITING,
    Task.DISTILLATION: WRITING,
    Task.PREFERENCE: (RowFormat.PREFERENCE, RowFormat.UNPAIRED),
    Task.REWARD: (RowFormat.PREFERENCE,),
    Task.CLASSIFICATION: (RowFormat.LABELLED,),
    Task.REGRESSION: (RowFormat.LABELLED,),
}


_WITHOUT: Mapping[RowFormat, str] = {
    RowFormat.TEXT: "needs conversations, and there are texts",
    RowFormat.MESSAGES: "needs rows that say where the prompt ends, and these are whole conversations",
    RowFormat.SHAREGPT: "needs rows that say where the prompt ends, and these are whole conversations",
    RowFormat.PREFERENCE: "is not what pairs are for, whose answers are compared",
    RowFormat.UNPAIRED: "is not what judged answers are for",
    RowFormat.LABELLED: "has no effect on rows that are learnt as a whole",
    RowFormat.TOKENS: "would replace the labels of pre-tokenised rows, or the learning of all their tokens",
}


class Described(Protocol):
    """Rows of one form, with a line about them."""

    @property
    def form(self) -> RowFormat: ...
    @property
    def description(self) -> str: ...


def tasks_for(form: RowFormat) -> tuple[Task, ...]:
    """The tasks that learn from rows of this form."""
    return tuple(task for task, forms in KINDS.items() if form in forms)


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
        if supervise is None or supervise in SUPERVISED[source.form]:
            continue
        works = " or ".join(SUPERVISED[source.form])
        expected = f"{works}, or nothing" if works else "nothing"
        message = f"`{supervise}` {_WITHOUT[source.form]}: {source.description}"
        raise RequestError([Problem("data.supervise", message, expected=expected)])

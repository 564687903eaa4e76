"""Training tasks and their facts, one row each. Imports no torch.

The rows determine the head of the model, the settings and row formats of a task, and its metrics. Its objective is
built in `framework.build.tasks`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from framework.schema.choices import Choice
from framework.schema.facts import UsedWith


class Task(Choice):
    """Training tasks."""

    SFT = "sft"
    PRETRAIN = "pretrain"
    PREFERENCE = "preference"
    REWARD = "reward"
    CLASSIFICATION = "classification"
    REGRESSION = "regression"
    DISTILLATION = "distillation"

    @property
    def facts(self) -> "TaskFacts":
        """The row of this task."""
        return TASKS[self]


@dataclass(frozen=True)
class TaskFacts:
    """Facts of one task."""

    metrics: tuple[str, ...]
    """Metrics by which the best checkpoint can be chosen. `router_loss` needs a router loss, `micro_f1` several classes
    a row, `reward_accuracy` pairs."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs of a head for rows, if neither `data.labels` nor the rows give them. Empty: the model has
    one output per token."""
    label: Literal["class", "value"] | None = None
    """What the label of a row is."""
    is_next_token: bool = False
    """Whether the loss is the cross entropy of each next token, so that parts of a row can be computed separately."""
    splits_documents: bool = False
    """Whether rows are documents: every token is supervised, and long ones are split instead of truncated."""
    compares_answers: bool = False
    """Whether it trains on judged answers to a prompt."""
    has_teacher: bool = False
    """Whether it trains on the outputs of `training.teacher`."""

    @property
    def is_of_rows(self) -> bool:
        """Whether the model has a head with one output per row instead of per token."""
        return bool(self.outputs)

    @property
    def trains_on_text(self) -> bool:
        """Whether it trains a language model on the text of a row."""
        return not self.is_of_rows and not self.compares_answers

    @property
    def compares_models(self) -> bool:
        """Whether its loss may compare the model with a second, frozen one: a teacher or a reference."""
        return self.has_teacher or (self.compares_answers and not self.is_of_rows)


_NEXT_TOKEN = TaskFacts(("eval_loss", "perplexity", "token_accuracy", "router_loss"), is_next_token=True)
_ANSWERS = TaskFacts(("eval_loss", "reward_accuracy", "reward_margin"), compares_answers=True)

TASKS: Mapping[Task, TaskFacts] = {
    Task.SFT: _NEXT_TOKEN,
    Task.PRETRAIN: replace(_NEXT_TOKEN, splits_documents=True),
    Task.PREFERENCE: _ANSWERS,
    Task.REWARD: replace(_ANSWERS, outputs=("reward",)),
    Task.CLASSIFICATION: TaskFacts(
        ("eval_loss", "accuracy", "macro_f1", "micro_f1"), ("negative", "positive"), label="class"
    ),
    Task.REGRESSION: TaskFacts(("eval_loss", "mse", "mae", "r2", "pearson"), ("value",), label="value"),
    Task.DISTILLATION: TaskFacts(("eval_loss", "divergence", "perplexity", "token_accuracy"), has_teacher=True),
}


def tasks_with(fact: Callable[[TaskFacts], object]) -> tuple[Task, ...]:
    """Tasks for which this is true."""
    return tuple(task for task, facts in TASKS.items() if fact(facts))


def used_by_tasks_with(fact: Callable[[TaskFacts], object]) -> UsedWith:
    """A key's fact: other tasks refuse to have it set."""
    return UsedWith("training.task", tasks_with(fact), refused=True)

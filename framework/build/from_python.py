"""Objective, optimizer and metrics passed by a Python program; YAML never names code."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from framework.build.tasks.objective import Objective
from framework.errors import Problem, RequestError
from framework.schema.choices import OptimizerOffload
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import FROM_PYTHON

MakeObjective: TypeAlias = Callable[[Objective], Objective]
"""Takes the task's objective, returns the one to train with."""
MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Takes parameter groups with `lr` and `weight_decay`, returns an optimizer, as torch's classes do."""
MakeMetric: TypeAlias = Callable[[Any, Any], float]
"""Takes the model, in eval mode and without gradients, and its tokenizer; returns a number, higher is better."""


@dataclass(frozen=True)
class FromPython:
    """An objective and an optimizer in place of the task's own and of `training.optimizer`, and further metrics."""

    objective: MakeObjective | None = None
    optimizer: MakeOptimizer | None = None
    metrics: Mapping[str, MakeMetric] = field(default_factory=dict)
    """By name; evaluations report them as `python/NAME`."""

    @property
    def names(self) -> dict[str, str]:
        """Qualified names of objective and optimizer, for the files of a run."""
        given = {"objective": self.objective, "optimizer": self.optimizer}
        return {key: _name(maker) for key, maker in given.items() if maker is not None}

    def notes(self, config: TrainingConfig) -> Iterator[str]:
        """A line for each part that a plan does not include, with the key that is not used."""
        if self.objective is not None:
            yield f"objective {_name(self.objective)} from Python: the plan has the loss of the task instead"
        if self.metrics:
            yield f"metrics {', '.join(self.metrics)} from Python: their memory is not in the plan"
        if self.optimizer is not None:
            key = f"training.optimizer={config.training.optimizer}"
            yield f"optimizer {_name(self.optimizer)} from Python: the plan has {key} instead, which is not used"

    def refuse(self, config: TrainingConfig) -> None:
        """Raise RequestError for options that have no effect with them or are not known to work with them."""
        training, problems = config.training, list[Problem]()
        kinds = " and ".join(self.names)
        if kinds and (config.fsdp.is_sharded or config.sharing > 1):
            message = f"{kinds} from Python would see parts of weights or rows"
            problems.append(Problem("fsdp", message, expected="one device, or copies of the whole model"))
        if self.objective is not None and training.task.facts.compares_models:
            message = f"an objective from Python does not replace that of {training.task}"
            problems.append(Problem("training.task", message, expected="sft, pretrain, or a task of rows"))
        if self.objective is not None and config.model.chunked_loss not in (None, False):
            message = "an objective from Python makes its own logits"
            problems.append(Problem("model.chunked_loss", message, expected="leave it out"))
        if self.objective is not None:
            terms = ("label_smoothing", "z_loss_coef")
            message = "is a term of the task's own objective"
            problems += [Problem(f"training.{name}", message, None, "0") for name in terms if getattr(training, name)]
        if self.optimizer is not None and training.optimizer_in_backward is True:
            problems.append(Problem("training.optimizer_in_backward", "needs a built-in optimizer", expected="false"))
        if self.optimizer is not None and training.optimizer_offload is not OptimizerOffload.NONE:
            problems.append(Problem("training.optimizer_offload", "needs a built-in optimizer", expected="none"))
        best = training.best_metric or ""
        if best.startswith(FROM_PYTHON) and best.removeprefix(FROM_PYTHON) not in self.metrics:
            message = f"is a metric from Python, and {', '.join(self.metrics) or 'none'} is given"
            expected = "train(config, metrics={name: function})"
            problems.append(Problem("training.best_metric", message, expected=expected))
        if problems:
            raise RequestError(problems)

    def made_objective(self, own: Objective) -> Objective:
        """The objective to train with, given the task's own."""
        return own if self.objective is None else self.objective(own)

    def made_optimizer(self, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
        """The program's optimizer over the groups. Raises RequestError if it is not a torch optimizer."""
        assert self.optimizer is not None
        made: object = self.optimizer([{**group, "lr": rate} for group in groups])  # a program may return anything
        if not isinstance(made, torch.optim.Optimizer):
            message = f"{_name(self.optimizer)} gave {type(made).__name__}"
            raise RequestError([Problem("optimizer", message, expected="a torch.optim.Optimizer")])
        return made


TASKS_OWN = FromPython()


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Raise RequestError if a run would be resumed with another objective or optimizer from Python; else no
    messages."""
    problems = [
        Problem(key, f"was {saved.get(key) or 'not given'}, is now {now.get(key) or 'not given'}: another run's")
        for key in ("objective", "optimizer")
        if saved.get(key) != now.get(key)
    ]
    if problems:
        raise RequestError(problems)
    return []


def _name(maker: Callable[..., Any]) -> str:
    """Qualified name of a function or class, as far as it has one."""
    return f"{getattr(maker, '__module__', '?')}.{getattr(maker, '__qualname__', type(maker).__name__)}"

"""Evaluation: the mean loss over held-out rows, and the task's metrics. No logits outlive their batch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.averages import averaged
from framework.build.losses.loss import Batch, Observe
from framework.build.tasks.objective import Objective
from framework.run.ranks.signals import Interrupt
from framework.run.step import eval_step
from framework.schema.evaluation import FROM_PYTHON

Sums: TypeAlias = Mapping[str, Tensor]
"""What an objective's `metrics` takes."""
MOST_METRICS = 6
"""Numbers of an evaluation on its line; `metrics.jsonl` has all."""


def format_losses(values: Mapping[str, float]) -> str:
    """An evaluation in a line: the loss, the first of the task's metrics, and the loss of each named set."""
    of_all = [(name.replace("_", " "), value) for name, value in values.items() if "/" not in name][1:MOST_METRICS]
    of_sets, own = (
        [(name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix)]
        for prefix in ("eval_loss/", FROM_PYTHON)
    )
    rest = (f"{name} {value:.4f}" for name, value in (*of_all, *of_sets, *own))
    return "  ".join([f"eval loss {values['eval_loss']:.4f}", *rest])


class Abandoned(Exception):
    """The run was asked to end while it evaluated."""


def until_asked(batches: Iterable[Batch], interrupt: Interrupt) -> Iterator[Batch]:
    """The batches. Raises Abandoned in place of the next one once Ctrl-C was pressed."""
    for batch in batches:
        if interrupt.asked:
            raise Abandoned
        yield batch


def evaluate(assembly: Assembly, batches: Iterable[Batch], observe: Observe) -> dict[str, float]:
    """`eval_loss` (mean over the terms of all batches of all ranks) and the task's metrics. Leaves the model in train
    mode."""
    return assembly.objective.metrics(sum_up(assembly, batches, observe))


def sum_up(assembly: Assembly, batches: Iterable[Batch], observe: Observe) -> Sums:
    """What the objective adds up over all batches of all ranks, float64 on the host. Leaves the model in train mode."""
    assembly.model.eval()
    total: dict[str, Tensor] = {}
    try:
        with averaged(assembly):
            for batch in batches:
                for name, value in eval_step(assembly, batch, observe).items():
                    total[name] = total.get(name, 0) + value.double().cpu()
    finally:
        assembly.model.train()
        if assembly.sharding is not None:
            assembly.sharding.free_gathered()  # no backward follows that would
        observe("end")
    if assembly.ranks.world > 1:
        device = assembly.place.device  # where the ranks can add up
        total = {name: assembly.ranks.sum(total[name].to(device)).cpu() for name in sorted(total)}
    return total


def add_up(sums: Iterable[Sums]) -> Sums:
    """The sums of several sets of rows as those of all of them."""
    total: dict[str, Tensor] = {}
    for own in sums:
        for name, value in own.items():
            total[name] = total.get(name, 0) + value
    return total


def metrics_of_sets(objective: Objective, sums: Mapping[str, Sums]) -> dict[str, float]:
    """`eval_loss` and the task's metrics over all rows, then those of each set that has a name, as `METRIC/NAME`."""
    named = ((name, objective.metrics(own)) for name, own in sums.items() if name)
    own = {f"{metric}/{name}": value for name, values in named for metric, value in values.items()}
    return objective.metrics(add_up(sums.values())) | own

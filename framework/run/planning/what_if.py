"""One key with several values, each planned: what changes with it. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import RequestError, TunesmithError
from framework.memory.ledger import Plan
from framework.run.planning.plan_pool import Rehearsals
from framework.schema.config import TrainingConfig


@dataclass(frozen=True)
class Row:
    """A value of the key and its plan; None where the built model refuses it, for which `refusal` has the reason."""

    value: str
    plan: Plan | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can run and its plan fits the card."""
        return self.plan is not None and self.plan.fits

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second of one device, where the card's speed is known."""
        return self.plan.step.tokens_per_second if self.plan is not None and self.plan.step is not None else None

    def to_json(self) -> dict[str, Any]:
        """The value with the document of its plan."""
        plan = self.plan.to_json() if self.plan is not None else None
        return {"value": self.value, "fits": self.fits, "plan": plan, "refusal": self.refusal or None}


def what_if(configs: Mapping[str, TrainingConfig]) -> list[Row]:
    """A row for each value. The configs differ in one key, and their rehearsals share what is the same in them.

    Raises TunesmithError where a plan fails for a fault of ours.
    """
    with Rehearsals() as rehearsals:
        return list(map(_row, configs, rehearsals.tried(list(configs.values()))))


def _row(value: str, made: Plan | TunesmithError) -> Row:
    if isinstance(made, Plan):
        return Row(value, made)
    if not isinstance(made, RequestError):
        raise made
    return Row(value, None, "; ".join(problem.message for problem in made.problems))

"""One key with several values, each planned: what changes with it. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.run.planning.plan_pool import Rehearsals
from framework.run.planning.plan_process import plan_in_subprocess
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
    """A row for each value. The configs differ in one key, and their rehearsals share what is the same in them."""
    with Rehearsals() as measure:
        plans = measure(list(configs.values()))
    return [
        Row(value, plan, "" if plan is not None else _refusal(config))
        for (value, config), plan in zip(configs.items(), plans, strict=True)
    ]


def _refusal(config: TrainingConfig) -> str:
    """Why a config cannot be planned. Raises TunesmithError where that is a fault of ours."""
    try:
        plan_in_subprocess(config)
    except RequestError as error:
        return "; ".join(problem.message for problem in error.problems)
    return "it could not be planned"

"""The main rank's plan, on every rank."""

import json

from framework.memory.ledger import Plan
from framework.run.planning.background_plan import Forecast
from framework.run.ranks.coordinator import Crew

PATIENCE = 5.0
"""Seconds that a rank which ran out of memory waits for what the levers would save: the others hang meanwhile."""


def plan_of_all(crew: Crew, forecast: Forecast | None, name: str = "plan") -> Forecast | None:
    """The main rank's plan, on every rank: so all refuse together, and each can explain its own memory. Each `name`
    once a run."""
    text = crew.shared(name, lambda: json.dumps(forecast.plan.to_json() if forecast is not None else None))
    if forecast is not None:
        if crew.ranks.world > 1:
            forecast.patience = PATIENCE
        return forecast
    document = json.loads(text)
    return Forecast(Plan.from_json(document)) if document is not None else None

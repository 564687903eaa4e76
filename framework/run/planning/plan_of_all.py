"""The main rank's plan, on every rank."""

import json

from framework.memory.ledger import Plan
from framework.run.ranks.coordinator import Coordinator


def plan_of_all(coordinator: Coordinator, plan: Plan | None, name: str = "plan") -> Plan | None:
    """The main rank's plan, on every rank: so all refuse together, and each can explain its own memory. Each `name`
    once a run."""
    text = coordinator.shared(name, lambda: json.dumps(plan.to_json() if plan is not None else None))
    document = json.loads(text)
    return Plan.from_json(document) if plan is None and document is not None else plan

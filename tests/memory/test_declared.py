"""A plan that is read again has the types that it declares, or is none."""

import json
from typing import Any

import pytest

from framework.memory.ledger import Plan
from tests.reports.plans import PLAN


def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(PLAN.to_json()))
    return read


def test_a_plan_is_read_again() -> None:
    assert Plan.from_json(document()) == PLAN
    assert Plan.from_json({**document(), "step": None, "run_hours": None}).step is None


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("device", "count", "many", "device.count is 'many'"),
        ("device", "name", 3, "device.name is '3'"),
        ("device", "count", True, "device.count is 'True'"),
        ("terms", "weights", None, "peak.terms.weights is 'None'"),
        ("terms", "weights", 1.5, "peak.terms.weights is '1.5'"),
        ("step", "seconds", float("nan"), "step.seconds is 'nan'"),
        ("host", "processes", 10**400, "host.processes is '1000"),
    ],
)
def test_another_kind_of_value_is_named(section: str, key: str, value: object, message: str) -> None:
    read = document()
    read[section][key] = value
    with pytest.raises(TypeError) as caught:
        Plan.from_json(read)
    assert str(caught.value).startswith(message)

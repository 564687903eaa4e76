"""The host's costs in `framework.memory.host_time` are what the recorded and measured steps give."""

import dataclasses
import json
import statistics

import pytest

from benchmarks.fit_step_time import RESULT, fitted, steps
from benchmarks.recorded_steps import CARD, archive
from benchmarks.replan_steps import asked, measured
from framework.memory.cards import read_card
from framework.memory.host_time import FITTED
from framework.memory.step_time import HOST_SHARES, estimate_step
from framework.schema.config import TrainingConfig

COMMITTED = json.loads(RESULT.read_text())


def test_costs_and_hosts_are_those_of_the_committed_fit() -> None:
    costs = dataclasses.asdict(FITTED)
    costs.pop("collective")
    assert costs == COMMITTED["host"]
    hosts = sorted(COMMITTED["machines"].values())
    assert tuple(COMMITTED["unknown"]) == HOST_SHARES
    sixths = statistics.quantiles(hosts, n=6, method="inclusive")
    assert sixths[::2] == pytest.approx(HOST_SHARES, abs=0.006)


@pytest.mark.slow
def test_the_fit_gives_the_committed_costs() -> None:
    found = fitted()
    assert found.constants == pytest.approx(COMMITTED["host"], rel=0.02)
    assert found.hosts == pytest.approx(COMMITTED["machines"], rel=0.01)


@pytest.mark.slow
def test_the_fit_plans_a_step_as_a_plan_does() -> None:
    card = TrainingConfig.model_validate({"gpu": read_card(CARD)}).gpu
    judges = steps("judges")
    assert len(judges) > 50
    for step in judges[::7]:
        planned = estimate_step(archive().operations(step.row.name), card, costs=FITTED.scaled(1.2))
        costs = [getattr(FITTED, name, 0.0) for name in COMMITTED["host"]]
        assert step.planned([*costs, 0.0, 0.0, 0.0, 0.0], 1.2) == pytest.approx(planned.seconds, rel=1e-6), step.row


def test_every_row_that_judges_is_planned_again_once() -> None:
    names = [row["name"] for row in asked()]
    assert len(names) == len(set(names)) == 59 + 49
    assert {name for _, name, _ in measured()} == set(names)

"""Steps that are planned and measured; the measuring itself on a card only."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from framework.cli import main
from framework.errors import OutOfMemory
from framework.memory.cards import read_card
from framework.memory.ledger import Plan
from framework.run.planning import measure
from framework.run.planning.host_probe import REFERENCE, HostSpeed
from framework.run.planning.measure import COMPARED, Compared, _configs, summary
from framework.run.planning.measurements import Measured, Measurements
from framework.run.planning.plan_pool import Rehearsals
from framework.schema.config import TrainingConfig
from tests.card import own_card


def test_the_steps_are_ones_that_a_card_of_8_gb_is_planned_for() -> None:
    configs = _configs({**read_card("rtx3060_12gb"), "host": {"python": 2.0}})
    assert set(configs) <= set(COMPARED)
    assert {config.training.use_peft for config in configs.values()} == {True, False}
    assert all(config.gpu.host is not None and config.gpu.host.python == 2.0 for config in configs.values())


def test_one_line_says_what_was_compared() -> None:
    rows = [Compared("full", True, 0.001, -0.02, None), Compared("adapter")]
    line = summary(rows, "NVIDIA X")
    assert line.startswith("NVIDIA X, torch ")
    assert line.endswith("full +0.1% -2.0% -; adapter did not fit did not fit did not fit")


def test_steps_are_measured_before_this_process_takes_memory_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def measured(config: TrainingConfig) -> Measured:
        done.append("measured")
        if config.training.use_peft:
            raise OutOfMemory("tried 9 GiB")
        return Measured("a card", 1000, 0, 2000, 0.5, 1.0, {}, 2.5, "2.13.0")

    def probe_host() -> HostSpeed:
        done.append("probed")
        return HostSpeed({kind: 2 * seconds for kind, seconds in REFERENCE.items()}, 1.0)

    class Planned(Rehearsals):
        def plans(self, configs: Sequence[TrainingConfig]) -> list[Plan]:
            assert all(config.gpu.host is not None and config.gpu.host.python == 2.0 for config in configs)
            use, step = SimpleNamespace(allocated_bytes=1100, device_bytes=1900), SimpleNamespace(seconds=0.6)
            return [cast(Plan, SimpleNamespace(step_peak=use, step=step))] * len(configs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "installed_cards", lambda: [SimpleNamespace(name="h200_141gb", product="NVIDIA H200")])
    monkeypatch.setattr(measure, "probe_host", probe_host)
    monkeypatch.setattr(measure, "Rehearsals", Planned)
    name, rows = measure.compare(cast(Measurements, measured))
    assert name == "NVIDIA H200"
    assert done == ["measured"] * len(rows) + ["probed"]
    assert [row.name for row in rows] == [*_configs({})]
    assert {row.cells()[1:] for row in rows} == {("+10.0%", "-5.0%", "+20.0%"), ("did not fit",) * 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compare"]) == 2
    assert "no CUDA card" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_card_is_compared() -> None:
    with own_card(), Measurements() as measured:
        free, total = torch.cuda.mem_get_info()  # other tests of this process have left memory in use

        def measured_alone(config: TrainingConfig) -> Measured:
            found = measured(config)
            return replace(found, device_bytes=found.device_bytes - (total - free))

        _, rows = measure.compare(cast(Measurements, measured_alone))
    assert sum(row.fits for row in rows) >= 3
    for row in rows:
        assert row.allocated is None or abs(row.allocated) < 0.01, row
        assert row.used is None or abs(row.used) < 0.03, row

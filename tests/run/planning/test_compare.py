"""Steps that are planned and measured; the measuring itself on a card only."""

import json

import pytest
import torch

from framework.cli import main
from framework.memory.cards import read_card
from framework.run.planning.measure import COMPARED, Compared, _configs, summary


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compare"]) == 2
    assert "no CUDA card" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_card_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compare", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(abs(row["allocated"]) < 0.01 for row in rows if row["fits"])

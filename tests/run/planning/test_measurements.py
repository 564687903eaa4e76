"""Measurements in forks of a server; the measuring itself is replaced, or runs on a card only."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from framework.errors import OutOfMemory, Problem, RequestError, TunesmithError
from framework.run.planning import measure, measurements
from framework.run.planning.measurements import Measured, Measurements
from framework.run.ranks.environment import python_command
from framework.schema.config import TrainingConfig
from tests.processes import is_working, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12

FOUND = Measured("a card", 1, 2, 3, 0.5, 100.0, {"forward": 1}, 2.5, "2.13.0")


def answer_of(monkeypatch: pytest.MonkeyPatch, measured) -> dict[str, object]:
    monkeypatch.setattr(measure, "measure", measured)
    return measure._measured_in_fork(TrainingConfig().model_dump(mode="json"))


def test_a_fork_answers_with_the_measurement_of_the_config(monkeypatch) -> None:
    def measured(config: TrainingConfig) -> Measured:
        assert config == TrainingConfig()
        assert os.getpid() != parent
        return FOUND

    parent = os.getpid()
    assert Measured(**answer_of(monkeypatch, measured)) == FOUND


def test_problems_come_back_and_a_fork_that_is_killed_is_a_fault(monkeypatch, capsys) -> None:
    def refused(_: TrainingConfig) -> Measured:
        raise RequestError([Problem("--measure", "no")])

    def full(_: TrainingConfig) -> Measured:
        raise OutOfMemory("tried 9 GiB")

    def killed(_: TrainingConfig) -> Measured:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def broken(_: TrainingConfig) -> Measured:
        raise ZeroDivisionError

    assert answer_of(monkeypatch, refused)["errors"] == [Problem("--measure", "no").to_json()]
    assert answer_of(monkeypatch, full) == {"out_of_memory": "tried 9 GiB"}
    assert answer_of(monkeypatch, killed) == {"fault": "its process ended: -9"}
    assert capsys.readouterr().err == "its process was ended by signal 9\n"
    assert answer_of(monkeypatch, broken) == {"fault": "its process ended: 1"}


ANSWERS = {
    "out_of_memory": (OutOfMemory, "tried 9 GiB"),
    "fault": (TunesmithError, "the measurement failed: its process ended: -9"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_each_answer_is_raised_as_its_error(kind, monkeypatch) -> None:
    error, message = ANSWERS[kind]
    text = json.dumps({kind: message.removeprefix("the measurement failed: ")})
    code = f"import sys\nfor line in sys.stdin: print({text!r}, flush=True)"
    monkeypatch.setattr(measurements, "_COMMAND", ["python3", "-c", code])
    with Measurements() as measured, pytest.raises(error, match=message):
        measured(TrainingConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_the_real_server_says_that_there_is_no_card() -> None:
    with Measurements() as measured:
        for _ in range(2):
            with pytest.raises(RequestError, match="no CUDA card"):
                measured(TrainingConfig())


def command_of(*lines: str) -> list[str]:
    """A server whose measurement, `measured`, is given by lines of code."""
    code = ("import os, time, torch", "from framework.run.planning import measure", *lines)
    return python_command("\n".join([*code, "measure.measure = measured", "measure.serve()"]), flags=("-W", "ignore"))


def test_where_cuda_has_started_each_server_measures_once_itself(monkeypatch) -> None:
    names = dict.fromkeys(FOUND.to_json(), 0)
    answer = f"def measured(config): return measure.Measured(**{{**{names}, 'device_name': str(os.getpid())}})"
    monkeypatch.setattr(measurements, "_COMMAND", command_of("torch.cuda.is_initialized = lambda: True", answer))
    with Measurements() as measured:
        first, second = (int(measured(TrainingConfig()).device_name) for _ in range(2))
        assert first != second
        assert not is_working(first), "it would hold memory of the card during the second measurement"


CLIENT = (
    "from framework.run.planning import measurements",
    "from framework.schema.config import TrainingConfig",
    "with measurements.Measurements() as measured: measured(TrainingConfig())",
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_measurement_ends_with_the_command_that_waits_for_it(number, tmp_path: Path) -> None:
    begun = tmp_path / "pid"
    slow = f"def measured(config): open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(40)"
    imported, *used = CLIENT
    code = "\n".join([f"{imported}; measurements._COMMAND = {command_of(slow)!r}", *used])
    with subprocess.Popen(python_command(code, flags=("-W", "ignore")), stderr=subprocess.PIPE) as client:
        measuring = int(wait_for(lambda: begun.exists() and begun.read_text()))
        assert is_working(measuring)
        client.send_signal(number)
        client.wait(timeout=20)
    wait_for(lambda: not is_working(measuring))

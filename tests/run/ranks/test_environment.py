"""Who started this process, as its environment says."""

import subprocess

import pytest

from framework.errors import RequestError
from framework.run.ranks.environment import Launched, launched

TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
SLURM = {
    **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node[03-04]"},
}


def test_a_process_on_its_own_was_started_by_nothing() -> None:
    assert launched({}) is None


def test_torchrun_says_all() -> None:
    found = launched({**TORCH, "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"})
    assert found == Launched(3, 4, 1, "torchrun", "a", 29500, 2)


def test_half_of_what_torchrun_says_is_an_error() -> None:
    with pytest.raises(RequestError, match="MASTER_PORT"):
        launched(TORCH)


def test_slurm_is_asked_for_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def scontrol(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command == ["scontrol", "show", "hostnames", "node[03-04]"]
        return subprocess.CompletedProcess(command, 0, "node03\nnode04\n", "")

    monkeypatch.setattr(subprocess, "run", scontrol)
    assert launched(SLURM) == Launched(5, 8, 1, "srun", "node03", 15_078, 4)
    given = launched({**SLURM, "MASTER_ADDR": "login", "MASTER_PORT": "4000"})
    assert given is not None
    assert (given.address, given.port) == ("login", 4000)


def test_one_machine_needs_no_scontrol() -> None:
    found = launched({**SLURM, "SLURM_STEP_NODELIST": "node07"})
    assert found is not None
    assert found.address == "node07"


def test_without_scontrol_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(RequestError, match="MASTER_ADDR"):
        launched(SLURM)


def test_a_batch_script_is_no_task_of_a_step() -> None:
    """sbatch numbers its script as task 0 of as many as were asked for; without srun it is one process."""
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}) is None
    assert launched({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None

"""Disk and host memory are compared with the plan before anything is loaded."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from framework.errors import DoesNotFit
from framework.memory.host_use import WORKER_BYTES
from framework.memory.ledger import HostUse
from framework.run.planning import capacity as room
from tests.reports.plans import GIB, PLAN


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of which `free` bytes are left."""
    usage = SimpleNamespace(free=200 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return usage


@pytest.fixture(autouse=True)
def _ample_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_host_bytes", lambda: 1 << 50)


def test_c07_three_checkpoints_of_90_gib_do_not_go_into_200(tmp_path: Path, disk: SimpleNamespace) -> None:
    plan = replace(PLAN, checkpoint_bytes=90 * GIB, disk_bytes=285 * GIB)
    with pytest.raises(
        DoesNotFit, match=r"up to 285.00 GiB \(90.00 GiB a checkpoint\), .* has 200.00 GiB free"
    ) as raised:
        room.require_capacity(plan, tmp_path / "not" / "yet" / "made")
    assert "training.save_total_limit" in str(raised.value)
    room.require_capacity(replace(plan, disk_bytes=199 * GIB), tmp_path)


def test_a_fallback_has_space_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {tmp_path: 300 * GIB, tmp_path / "other": 89 * GIB}
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    plan = replace(PLAN, checkpoint_bytes=90 * GIB, disk_bytes=285 * GIB)
    with pytest.raises(DoesNotFit, match=r"fallback_dir is for checkpoints of 90\.00 GiB, .*other has 89\.00 GiB free"):
        room.require_capacity(plan, tmp_path / "run", fallback=tmp_path / "other" / "run-1")
    free[tmp_path / "other"] = 90 * GIB
    room.require_capacity(plan, tmp_path / "run", fallback=tmp_path / "other" / "run-1")
    free[tmp_path] = 284 * GIB
    with pytest.raises(DoesNotFit, match=r"writes up to 285\.00 GiB"):
        room.require_capacity(plan, tmp_path / "run", fallback=tmp_path / "other" / "run-1")


def test_files_of_an_earlier_run_in_the_folder_count_as_free_space(tmp_path: Path, disk: SimpleNamespace) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(2000))
    (tmp_path / "notes.txt").write_bytes(bytes(5000))  # not ours: stays
    disk.free = 1000
    room.require_capacity(replace(PLAN, disk_bytes=3000), tmp_path)
    with pytest.raises(DoesNotFit):
        room.require_capacity(replace(PLAN, disk_bytes=3001), tmp_path)


def test_both_shortages_are_reported_at_once(
    tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_host_bytes", lambda: GIB)
    disk.free = 0
    with pytest.raises(DoesNotFit, match=r"has 0 bytes free.*needs up to 1,280.00 GiB of host memory"):
        room.require_capacity(replace(PLAN, host_bytes=1280 * GIB), tmp_path)


def test_too_many_workers_are_refused_with_the_number_that_fits(
    tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0)))
    monkeypatch.setattr(room, "available_host_bytes", lambda: 10 * GIB)
    plan = replace(PLAN, host_bytes=9 * GIB + 16 * WORKER_BYTES)
    with pytest.raises(DoesNotFit, match=r"enough for 5 of the 16 data\.workers"):
        room.require_capacity(plan, tmp_path, workers=16)
    room.require_capacity(replace(plan, host_bytes=9 * GIB + 5 * WORKER_BYTES), tmp_path, workers=5)
    with pytest.raises(DoesNotFit) as raised:  # without any it would not fit either
        room.require_capacity(replace(plan, host_bytes=20 * GIB), tmp_path, workers=4)
    assert "data.workers" not in str(raised.value)


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(room, "_MEMORY_LIMIT", limit)
    monkeypatch.setattr(room, "_MEMORY_USED", used)
    system = room.available_host_bytes()
    used.write_text("300\n")
    limit.write_text("1000\n")
    assert room.available_host_bytes() == 700
    limit.write_text("max\n")
    assert room.available_host_bytes() > 700
    assert system > 700


def test_all_processes_of_a_machine_need_memory(
    tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of each process but the first, and memory in use before."""
    monkeypatch.setattr(
        room.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GIB // 2))
    )
    monkeypatch.setattr(room, "available_host_bytes", lambda: 96 * GIB)
    host = HostUse(processes=8, other_bytes=10 * GIB, pinned_bytes=6 * GIB)
    plan = replace(PLAN, host_bytes=30 * GIB, host=host)
    room.require_capacity(plan, tmp_path, processes=8)
    message = (
        r"needs up to 101.00 GiB of host memory for 8 processes \(48.00 GiB of it pinned\), 100.00 GiB is available"
    )
    with pytest.raises(DoesNotFit, match=message):
        room.require_capacity(replace(plan, host_bytes=31 * GIB), tmp_path, processes=8)
    given_up = replace(plan, host_bytes=35 * GIB, host=replace(host, end_bytes=5 * GIB))
    room.require_capacity(given_up, tmp_path, processes=8)  # then files are written one after the other
    disk.free = 0
    room.require_capacity(plan, None, processes=8)  # another machine writes


def test_workers_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0)))
    monkeypatch.setattr(room, "available_host_bytes", lambda: 8 * GIB + 6 * WORKER_BYTES)
    each = 4 * GIB + 4 * WORKER_BYTES
    plan = replace(PLAN, host_bytes=each, host=HostUse(processes=2, other_bytes=each))
    with pytest.raises(DoesNotFit, match=r"enough for 3 of the 4 data\.workers"):
        room.require_capacity(plan, None, workers=4, processes=2)

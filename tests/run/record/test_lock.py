"""One run in a folder at a time, identified by host and process, also after one was killed or its host died."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from framework.errors import RequestError
from framework.run.record import lock
from framework.run.record.lock import FILE, only_run, refuse_taken

HOLDER = """
import sys, time
from pathlib import Path
from framework.run.record.lock import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_run_is_refused_with_host_and_process_of_the_first(tmp_path, holder):
    who = f"process {holder.pid} on {socket.gethostname()} is training in"
    with pytest.raises(RequestError, match=who), only_run(tmp_path):
        pass
    with pytest.raises(RequestError, match=who):
        refuse_taken(tmp_path)


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / FILE).exists()
    refuse_taken(tmp_path)
    with only_run(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / FILE).exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_outlives_the_run_does_not_hold_it(tmp_path):
    with only_run(tmp_path):
        if not (child := os.fork()):
            time.sleep(600)
            os._exit(0)
    with only_run(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def other_host(folder, age):
    """The lock of a host that does not share locks with this one, last renewed `age` seconds ago."""
    (folder / FILE).write_text(json.dumps({"host": "node07", "pid": 12}))
    os.utime(folder / FILE, (time.time() - age,) * 2)


def test_another_host_whose_lock_is_fresh_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.5)
    monkeypatch.setattr(lock, "STALE", 200.0)
    other_host(tmp_path, 1)
    refuse_taken(tmp_path)  # which would have to wait for a beat
    done = threading.Event()

    def beat():
        while not done.wait(0.2):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RequestError, match="process 12 on node07 is training"), only_run(tmp_path):
            pass
    finally:
        done.set()
        thread.join()


def test_a_host_that_died_is_waited_for_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "STALE", 0.6)
    began = time.monotonic()
    other_host(tmp_path, 0.1)
    with only_run(tmp_path):
        assert time.monotonic() - began > 0.4
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    other_host(tmp_path, 3600)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: pytest.fail("there is nothing to wait for"))
    with only_run(tmp_path):
        pass


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    began = time.time()
    with only_run(tmp_path):
        os.utime(tmp_path / FILE, (1, 1))
        end = time.monotonic() + 200
        while (tmp_path / FILE).stat().st_mtime < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert (tmp_path / FILE).stat().st_mtime > began - 1
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_locks_go_by_the_process(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    (tmp_path / FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(RequestError, match=f"process {os.getppid()} on"), only_run(tmp_path):
        pass
    (tmp_path / FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 5}))
    with only_run(tmp_path):
        pass


def test_damaged_and_linked_locks(tmp_path):
    (tmp_path / FILE).write_bytes(b"\xff\x00[")
    with only_run(tmp_path):
        pass
    (tmp_path / FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(RequestError, match="cannot be opened"), only_run(tmp_path):
        pass
    assert not (tmp_path / "victim").exists()

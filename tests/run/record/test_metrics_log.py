"""A log that the disk does not take waits, and is lost last of all."""

import errno
import os

import pytest

from framework.run.record.metrics_log import MetricsLog


@pytest.fixture
def disk(monkeypatch):
    """`disk["room"]`: how many bytes can still be written."""
    room, write = {"room": 1 << 20}, os.write

    def limited(descriptor, data):
        part = bytes(data)[: room["room"]]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        room["room"] -= len(part)
        return write(descriptor, part)

    monkeypatch.setattr("framework.run.record.layout.os.write", limited)
    return room


def test_lines_wait_for_free_space_and_are_written_in_order(tmp_path, disk):
    messages = []
    log = MetricsLog(tmp_path, messages.append)
    log.append({"step": 1})
    disk["room"] = 5
    for step in (2, 3, 4):
        log.append({"step": step})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len(messages) == 1
    assert "wait in memory" in messages[0]
    disk["room"] = 1 << 20
    log.append({"step": 5})
    log.close(None)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    assert messages[1:] == ["metrics   4 lines that waited in memory are written"]


@pytest.mark.parametrize("has_elsewhere", [False, True])
def test_lines_still_waiting_at_the_end_go_elsewhere_or_are_reported(tmp_path, disk, has_elsewhere):
    messages = []
    log = MetricsLog(tmp_path, messages.append)
    disk["room"] = 0
    log.append({"step": 1})
    log.append({"step": 2})
    log.close(tmp_path / "other" if has_elsewhere else None)
    assert "the last 2 lines of" in messages[-1]
    if has_elsewhere:
        assert (tmp_path / "other" / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    else:
        assert "could not be written" in messages[-1]

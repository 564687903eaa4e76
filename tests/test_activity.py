"""The status of a command: a line now and again in a pipe, one overwritten line on a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from framework.__main__ import _is_long

ROOT = Path(__file__).parents[1]
SETUP = """
import sys, time
from framework import activity
from framework.terminal import visible_streams

written, put = [], activity._Activity._put

class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

def noted(line, text):
    written.extend([text] * ("working" in text))
    put(line, text)

def passes(seconds):
    "Time during which the thread looks ten times."
    clock.now += seconds
    time.sleep(0.1)

def until(count):
    "That many lines in all: the thread may get no turn for a while."
    while len(written) < count:
        time.sleep(0.01)

clock = activity.time = Clock()
activity._Activity._put, activity._TICK = noted, 0.01
"""


def ran(code: str, **options: int) -> subprocess.CompletedProcess[bytes]:
    """The code with a clock of its own, which `passes` moves on."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", SETUP + code]
    return subprocess.run(command, cwd=ROOT, check=True, timeout=250, **{**piped, **options})  # type: ignore[call-overload]


def in_pipe(code: str) -> list[str]:
    return ran(code).stderr.decode().splitlines()


def on_terminal(code: str) -> str:
    """What a terminal is sent."""
    above, below = pty.openpty()
    try:
        ran(code, stderr=below)
        os.write(below, b"end")  # else nothing would be waited for where nothing was sent
        return os.read(above, 1 << 20).decode().removesuffix("end")
    finally:
        os.close(above)
        os.close(below)


def test_in_a_pipe_there_is_a_line_within_a_second_and_no_other_for_a_while() -> None:
    code = """
with activity.shown('reading'):
    passes(0.4)
    assert not written
    passes(0.2)
    until(1)
    passes(9)
"""
    assert in_pipe(code) == ["working   reading (1 s)"]


def test_what_takes_no_time_says_nothing() -> None:
    assert in_pipe("with activity.shown('reading'):\n    pass") == []
    assert in_pipe("with activity.shown('reading', is_wanted=False):\n    passes(60)") == []
    assert in_pipe("activity.now('reading', is_long=True)\npasses(60)") == []


def test_lines_come_again_and_say_what_is_done_then() -> None:
    code = """
with activity.shown('reading'):
    passes(0.6)
    until(1)
    with activity.doing('planning'):
        passes(10)
        until(2)
    passes(10)
    until(3)
    activity.now('')
    passes(30)
"""
    assert in_pipe(code) == ["working   reading (1 s)", "working   planning (11 s)", "working   reading (21 s)"]


def test_what_is_long_is_reported_before_it_begins() -> None:
    """A library that is loaded may keep threads from running."""
    code = "with activity.shown('x'):\n    activity.now('loading', is_long=True)\n    print('y', file=sys.stderr)"
    assert in_pipe(code) == ["working   loading (0 s)", "y"]


def test_nothing_is_added_while_other_lines_come() -> None:
    code = """
with activity.shown('stepping'), visible_streams():
    for step in range(4):
        print('step', step, file=sys.stderr)
        passes(9)
"""
    assert [line for line in in_pipe(code) if "working" in line] == []


def test_on_a_terminal_one_line_is_written_over_and_gives_way() -> None:
    code = """
with activity.shown('reading'), visible_streams():
    passes(0.9)
    until(1)
    print('a line', file=sys.stderr)
    passes(0.9)
    until(2)
"""
    sent = on_terminal(code)
    assert sent.count("working   reading") >= 2
    assert "\x1b[2Ka line\r\n" in sent, "the line is erased first"
    assert "reading (1 s)\r\n" not in sent
    assert sent.endswith("\r\x1b[2K"), "nothing is left of it"


def test_a_bar_shows_it_in_its_own_line() -> None:
    code = """
activity.FIRST = 100
with activity.shown('reading'), activity.drawn_by(lambda text: written.append(text) or print('bar:', text)):
    activity.now('saving', is_long=True)
    passes(200)
    until(2)
"""
    assert "working" not in on_terminal(code).replace("\r\x1b[2K", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(("train a.yaml", True), ("fit a.yaml gpu=24gb", True), ("train a.yaml --quiet", False)),
        *(("check a --quick", False), ("plan --help", False), ("list gpus", True), ("levers", True), ("", False)),
    ],
)
def test_commands_that_are_waited_for(arguments: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert _is_long(arguments.split()) is expected
    monkeypatch.setenv("RANK", "1")
    assert not _is_long(arguments.split()), "the first of several says it"

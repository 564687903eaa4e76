"""What a command is doing, said on stderr while it says nothing else.

On a terminal it is one line that is written over; elsewhere a line within a second, and then one every ten seconds in
which no other was written. Nothing is said outside of `shown`, as where Python code of others calls ours.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from framework.terminal import BEFORE_OUTPUT

FIRST, EVERY = 0.5, 10.0
"""Seconds until the first line, and between lines that are not written over."""
_TICK = 0.25
_ERASE = "\r\x1b[2K"


class _Activity:
    """The line of one command, kept up by a thread."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._process = os.getpid()
        self._stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self._is_drawn_over = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._written = self._began - EVERY + FIRST
        self._is_on_screen = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.draws: Callable[[str], None] | None = None
        """What shows the text in place of a line of its own."""
        self._thread = threading.Thread(target=self._keep_up, daemon=True, name="activity")
        self._thread.start()

    def now(self, what: str, is_long: bool) -> None:
        self.what = what
        if is_long and (self._written < self._began or self._is_drawn_over):
            self._say()

    def erase(self) -> None:
        """Something else is written: the line gives way, and comes again when there is time."""
        if os.getpid() != self._process:
            return
        self._written = time.monotonic()
        if self._is_on_screen:
            with self._lock:
                self._put(_ERASE)
                self._is_on_screen = False

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.erase()

    def _keep_up(self) -> None:
        while not self._ended.wait(_TICK):
            if time.monotonic() - self._written >= (FIRST if self._is_drawn_over else EVERY):
                self._say()

    def _say(self) -> None:
        if not self.what or self._ended.is_set():
            return
        text = f"working   {self.what} ({time.monotonic() - self._began:.0f} s)"
        with self._lock:
            self._written = time.monotonic()
            if self.draws is not None:
                self.draws(text)
            elif self._is_drawn_over:
                self._put(f"{_ERASE}{text[: _columns() - 1]}")
                self._is_on_screen = True
            else:
                self._put(f"{text}\n")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            self._stream.write(text)
            self._stream.flush()


def _columns() -> int:
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


_current: _Activity | None = None


@contextlib.contextmanager
def shown(what: str, is_wanted: bool = True) -> Iterator[None]:
    """Within the block it is said what is being done, at first `what`, where that `is_wanted`."""
    global _current
    if not is_wanted or _current is not None:
        with doing(what):
            yield
        return
    _current = _Activity(what)
    BEFORE_OUTPUT.append(_current.erase)
    try:
        yield
    finally:
        BEFORE_OUTPUT.remove(_current.erase)
        _current.end()
        _current = None


def now(what: str, is_long: bool = False) -> None:
    """From here on this is done; empty: nothing that a person would wait for. What `is_long` is said at once: it may
    keep every thread from running, as a library does that is loaded."""
    if _current is not None:
        _current.now(what, is_long)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Within the block this is done, afterwards what was done before."""
    before = _current.what if _current is not None else ""
    now(what)
    try:
        yield
    finally:
        now(before)


@contextlib.contextmanager
def drawn_by(draws: Callable[[str], None]) -> Iterator[None]:
    """Within the block something else that is on the terminal, such as a bar, shows what is being done."""
    activity = _current
    if activity is None:
        yield
        return
    activity.erase()
    activity.draws = draws
    try:
        yield
    finally:
        activity.draws = None

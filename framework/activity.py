"""Activity line on stderr: what a command is doing while it prints nothing else.

On a terminal this is one line that is overwritten; elsewhere a line within a second, then one after every ten seconds
without other output. Nothing is printed outside of `shown`, for example when other Python code calls this package.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from framework.terminal import BEFORE_OUTPUT

FIRST, EVERY = 0.5, 10.0
"""Seconds until the first line, and between lines where they cannot be overwritten."""
_TICK = 0.25
_ERASE = "\r\x1b[2K"


class _Activity:
    """The activity line of one command, refreshed by a thread."""

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
        """Shows the text instead of a separate line."""
        self._thread = threading.Thread(target=self._keep_up, daemon=True, name="activity")
        self._thread.start()

    def now(self, what: str, is_long: bool) -> None:
        self.what = what
        if is_long and (self._written < self._began or self._is_drawn_over):
            self._say()

    def erase(self) -> None:
        """Remove the line because something else is about to be written; the thread draws it again later."""
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
        with contextlib.suppress(OSError, ValueError):  # the reader has closed its end
            self._stream.write(text)
            self._stream.flush()


def _columns() -> int:
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


_current: _Activity | None = None


@contextlib.contextmanager
def shown(what: str, is_wanted: bool = True) -> Iterator[None]:
    """Show the activity within the block, beginning with `what`, if `is_wanted`."""
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
    """Set the current activity; empty for nothing worth waiting for. If `is_long` it is printed at once, because it may
    block every thread, as loading a library does."""
    if _current is not None:
        _current.now(what, is_long)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Set the activity within the block and restore the previous one afterwards."""
    before = _current.what if _current is not None else ""
    now(what)
    try:
        yield
    finally:
        now(before)


@contextlib.contextmanager
def drawn_by(draws: Callable[[str], None]) -> Iterator[None]:
    """Let something else on the terminal, such as a progress bar, show the activity within the block."""
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

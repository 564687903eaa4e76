"""A limit on the processor time and the memory of foreign code that runs in this process, such as a chat template."""

import contextlib
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


MOST_BYTES = 2**30
"""That the process may grow by during one call. Templates make texts of a few MB."""
TICKS = 10
"""Looks in the time that a call may take. In a tenth of a second a text that is doubled over and over grows by 1 GB."""


class OutOfTime(BaseException):
    """The limit that was reached, in words. No Exception, so that nothing takes it for a fault of its own."""


@dataclass
class _Watch:
    """Counts the ticks of the timer at which one call is at work, and looks at each what the process has grown by."""

    seconds: float
    call: int = 0
    seen: int = -1
    ticks: int = 0
    resident: int = 0
    is_at_work: bool = False

    def tick(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_at_work:
            self.seen = -1
        elif self.call != self.seen:
            self.seen, self.ticks, self.resident = self.call, 0, _resident()
        else:
            self.ticks += 1
            if self.ticks >= TICKS:
                raise OutOfTime(f"more than {self.seconds:g} s")
            if _resident() - self.resident > MOST_BYTES:
                raise OutOfTime(f"more than {MOST_BYTES / 2**30:g} GiB of memory")


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


_watches: list[_Watch] = []


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Have every `limited` call inside end after so many seconds of processor time, and a tenth more at most; a busy
    machine does not matter. One timer for many calls, since to set it takes as long as a short call.

    Only Python's main thread can be interrupted: in others, and where the system has no such timer, there is no limit.
    """
    if _watches or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "ITIMER_VIRTUAL"):
        yield
        return
    _watches.append(_Watch(seconds))
    before = signal.signal(signal.SIGVTALRM, _watches[0].tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds / TICKS, seconds / TICKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before if before is not None else signal.SIG_DFL)
        _watches.clear()


def limited(call: Callable[[], T]) -> T:
    """What the call returns. Raises OutOfTime where it takes too long inside of `watched`."""
    if not _watches or threading.current_thread() is not threading.main_thread():
        return call()
    watch = _watches[0]
    watch.call += 1
    watch.is_at_work = True
    try:
        return call()
    finally:
        watch.is_at_work = False

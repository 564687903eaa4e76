"""A limit on the processor time of foreign code that runs in this process, such as a chat template."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class OutOfTime(BaseException):
    """The limit was reached. No Exception, so that nothing on the way takes it for a fault of its own."""


@dataclass
class _Watch:
    """Looks at each tick of the timer whether the call at work is the one that was at work at the tick before."""

    call: int = 0
    seen: int = -1
    is_at_work: bool = False

    def tick(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_at_work and self.call == self.seen:
            raise OutOfTime
        self.seen = self.call if self.is_at_work else -1


_watches: list[_Watch] = []


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Have every `limited` call inside end after one to two times so many seconds of processor time; a busy machine
    does not matter. One timer for many calls, since to set it takes as long as a short call.

    Only Python's main thread can be interrupted: in others, and where the system has no such timer, there is no limit.
    """
    if _watches or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "ITIMER_VIRTUAL"):
        yield
        return
    _watches.append(_Watch())
    before = signal.signal(signal.SIGVTALRM, _watches[0].tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
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

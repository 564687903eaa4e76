"""A limit on the processor time of foreign code that runs in this process, such as a chat template."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class OutOfTime(BaseException):
    """The limit was reached. No Exception, so that nothing on the way takes it for a fault of its own."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside once the process has computed for so many seconds.

    Processor time, so a busy machine does not matter. Only Python's main thread can be interrupted: in others, and
    where the system has no such timer, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "ITIMER_VIRTUAL"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before if before is not None else signal.SIG_DFL)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTime

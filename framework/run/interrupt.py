"""Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Whether the user (or a job scheduler's SIGTERM) has asked the run to end."""

    asked = False


@contextlib.contextmanager
def watched_interrupt() -> Iterator[Interrupt]:
    """An `Interrupt` that the first SIGINT or SIGTERM sets; the second is handled as before. Main thread only."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        interrupt.asked = True
        restore()

    for number in earlier:
        signal.signal(number, ask)
    try:
        yield interrupt
    finally:
        restore()

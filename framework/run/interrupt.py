"""Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once. Loads no torch."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def passing_signals_on(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the processes, which save and end. Start them in sessions of their own, so that a
    terminal does not send them a second one. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

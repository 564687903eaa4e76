"""Ctrl-C: before the first step leave at once; later finish the step, save, leave. A second Ctrl-C leaves at once.

A job scheduler's SIGTERM is taken for Ctrl-C. Loads no torch.
"""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from framework.errors import Interrupted

BEFORE_ALL = "left before the first step; nothing was written"


class Interrupt:
    """Whether the user (or a job scheduler's SIGTERM) has asked the run to end."""

    asked = False


@contextlib.contextmanager
def told_interrupt(said: Callable[[], str]) -> Iterator[None]:
    """Raises Interrupted, with what was left, where Ctrl-C or SIGTERM ends what is within. Main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(said()) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, earlier)


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
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM as they come, for who looks at the list. Main thread only."""
    noted: list[int] = []
    with _handled(lambda number, frame: noted.append(number)):
        yield noted


@contextlib.contextmanager
def passing_signals_on(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the processes, which save and end. Start them in sessions of their own, so that a
    terminal does not send them a second one. Main thread only."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with _handled(pass_on):
        yield


@contextlib.contextmanager
def _handled(by: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, by) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

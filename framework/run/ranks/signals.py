"""Ctrl-C: before the first step leave at once; later finish the step, save, leave. A second Ctrl-C leaves at once.

A job scheduler's SIGTERM is taken for Ctrl-C, and so is SIGHUP, of a terminal or ssh session that has gone; but that
one never counts as the second, since shells and the system send it more than once. Loads no torch.
"""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from framework.errors import Interrupted

_ENDING = (signal.SIGTERM, signal.SIGHUP)
BEFORE_ALL = "left before the first step; nothing was written"


class Interrupt:
    """Whether the user (or a job scheduler's SIGTERM) has asked the run to end."""

    asked = False


@contextlib.contextmanager
def announced_interrupt(said: Callable[[], str]) -> Iterator[None]:
    """Raises Interrupted, with what was left, where Ctrl-C, SIGTERM or SIGHUP ends what is within. Main thread only."""
    try:
        with _handled(signal.default_int_handler, _ENDING):
            yield
    except KeyboardInterrupt:
        raise Interrupted(said()) from None


@contextlib.contextmanager
def watched_interrupt() -> Iterator[Interrupt]:
    """An `Interrupt` that the first signal sets; a second SIGINT or SIGTERM is handled as before. Main thread only."""
    interrupt = Interrupt()
    with contextlib.ExitStack() as handlers:

        def ask(number: int, frame: FrameType | None) -> None:
            interrupt.asked = True
            handlers.close()

        def hang_up(number: int, frame: FrameType | None) -> None:
            interrupt.asked = True

        with _handled(hang_up, (signal.SIGHUP,)):
            handlers.enter_context(_handled(ask, (signal.SIGINT, signal.SIGTERM)))
            with handlers:
                yield interrupt


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP as they come, for who looks at the list. Main thread only."""
    noted: list[int] = []
    with _handled(lambda number, frame: noted.append(number), (signal.SIGINT, *_ENDING)):
        yield noted


@contextlib.contextmanager
def passing_signals_on(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP go to the processes, which save and end. Start them in sessions of their own, so that
    a terminal does not send them a second one. Main thread only."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with _handled(pass_on, (signal.SIGINT, *_ENDING)):
        yield


@contextlib.contextmanager
def _handled(by: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Within the block the signals are handled by a function. SIGHUP stays ignored where it was (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, by) for number in taken}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

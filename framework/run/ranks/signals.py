"""Ctrl-C handling: before the first step exit at once; later finish the step, save, exit. A second Ctrl-C exits at
once.

A job scheduler's SIGTERM counts as Ctrl-C. So do SIGHUP, of a closed terminal or ssh session, and SIGUSR1, SIGUSR2 and
SIGXCPU, with which schedulers warn of a limit; but these never count as the second, since they may be sent repeatedly.
Loads no torch.
"""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from framework.errors import Interrupted

_WARNING = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Handled only if they would end the process: nohup ignores SIGHUP, submitit handles SIGUSR2 itself."""
_ENDING = (signal.SIGTERM, *_WARNING)
_handlers: list[Callable[[int, FrameType | None], Any]] = []
"""Functions of this module that currently handle a signal."""
BEFORE_ALL = "interrupted before the first step; nothing was written"


class Interrupt:
    """Flag that the user (or a job scheduler) has asked the run to end."""

    asked = False


@contextlib.contextmanager
def announced_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C or a signal of _ENDING within the block into Interrupted with the text of `describe`. Main thread
    only."""
    try:
        with _handled(signal.default_int_handler, _ENDING):
            yield
    except KeyboardInterrupt:
        raise Interrupted(describe()) from None


@contextlib.contextmanager
def watched_interrupt() -> Iterator[Interrupt]:
    """Yield an `Interrupt` that the first signal sets; a second SIGINT or SIGTERM has its usual effect. Main thread
    only."""
    interrupt = Interrupt()
    with contextlib.ExitStack() as handlers:

        def ask(number: int, frame: FrameType | None) -> None:
            interrupt.asked = True
            handlers.close()

        def warn(number: int, frame: FrameType | None) -> None:
            interrupt.asked = True

        with _handled(warn, _WARNING):
            handlers.enter_context(_handled(ask, (signal.SIGINT, signal.SIGTERM)))
            with handlers:
                yield interrupt


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect SIGINT and signals of _ENDING in a list. Main thread only."""
    noted: list[int] = []
    with _handled(lambda number, frame: noted.append(number), (signal.SIGINT, *_ENDING)):
        yield noted


@contextlib.contextmanager
def passing_signals_on(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Forward Ctrl-C and signals of _ENDING to the processes, which save and exit. They must be in sessions of their
    own, so that a terminal does not signal them too. Main thread only."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with _handled(pass_on, (signal.SIGINT, *_ENDING)):
        yield


@contextlib.contextmanager
def _handled(by: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Handle the signals by a function within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = (signal.SIG_DFL, *_handlers)
    taken = [each for each in numbers if each not in _WARNING or signal.getsignal(each) in own]
    earlier = {number: signal.signal(number, by) for number in taken}
    _handlers.append(by)
    try:
        yield
    finally:
        _handlers.remove(by)
        for number, handler in earlier.items():
            signal.signal(number, handler)

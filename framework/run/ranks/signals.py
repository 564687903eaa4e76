"""Ctrl-C: before the first step leave at once; later finish the step, save, leave. A second Ctrl-C leaves at once.

A job scheduler's SIGTERM is taken for Ctrl-C. So are SIGHUP, of a terminal or ssh session that has gone, and SIGUSR1,
SIGUSR2 and SIGXCPU, with which schedulers warn of a limit; but those never count as the second, since they may be sent
more than once. Loads no torch.
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
"""Handled only where they would end the process: nohup ignores SIGHUP, submitit handles SIGUSR2 itself."""
_ENDING = (signal.SIGTERM, *_WARNING)
_handlers: list[Callable[[int, FrameType | None], Any]] = []
"""Functions of this module that handle a signal now."""
BEFORE_ALL = "left before the first step; nothing was written"


class Interrupt:
    """Whether the user (or a job scheduler's SIGTERM) has asked the run to end."""

    asked = False


@contextlib.contextmanager
def announced_interrupt(said: Callable[[], str]) -> Iterator[None]:
    """Raises Interrupted, with what was left, where Ctrl-C or one of _ENDING ends what is within. Main thread only."""
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

        def warn(number: int, frame: FrameType | None) -> None:
            interrupt.asked = True

        with _handled(warn, _WARNING):
            handlers.enter_context(_handled(ask, (signal.SIGINT, signal.SIGTERM)))
            with handlers:
                yield interrupt


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and those of _ENDING as they come, for who looks at the list. Main thread only."""
    noted: list[int] = []
    with _handled(lambda number, frame: noted.append(number), (signal.SIGINT, *_ENDING)):
        yield noted


@contextlib.contextmanager
def passing_signals_on(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Ctrl-C and those of _ENDING go to the processes, which save and end. Start them in sessions of their own, so that
    a terminal does not send them a second one. Main thread only."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with _handled(pass_on, (signal.SIGINT, *_ENDING)):
        yield


@contextlib.contextmanager
def _handled(by: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Within the block the signals are handled by a function."""
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

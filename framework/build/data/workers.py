"""Processes that prepare batches (`data.workers`), and what becomes of a run when one of them dies."""

import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

DYING = 2.0
"""Seconds in which a process that has closed its sockets ends."""


class WorkersDied(RuntimeError):
    """A process that prepares batches was ended by something else. The batch is to be had from new ones."""


def from_workers(loader: "DataLoader[Any]") -> Iterator[Any]:
    """What a loader with workers yields. Raises WorkersDied where one of them has died.

    torch raises that in the handler of a signal, wherever the process is: also in the middle of an update. Here it is
    raised by the next batch alone, for which torch looks after its workers by itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    earlier = signal.getsignal(signal.SIGCHLD)
    made: Any = iter(loader)
    if is_main:
        signal.signal(signal.SIGCHLD, earlier)
    workers = getattr(made, "_workers", [])
    while True:
        try:
            batch = next(made)
        except StopIteration:
            return
        except Exception as error:
            if isinstance(error, OSError | EOFError):  # of the socket through which a batch comes, of one that is dying
                ended = wait([worker.sentinel for worker in workers], DYING)
                for worker in (each for each in workers if each.sentinel in ended):
                    worker.join(DYING)  # its threads may take longer
            if dead := [worker for worker in workers if not worker.is_alive()]:
                made._shutdown_workers()  # the others, which nothing else may ever end
                raise WorkersDied(f"a process that prepares batches {_end_of(dead[0].exitcode)}") from error
            raise
        yield batch


def _end_of(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), by a user or by the system when the host's memory ran out"
    if code == -signal.SIGBUS:
        return "died of SIGBUS: /dev/shm, through which batches come, is full"
    return f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"

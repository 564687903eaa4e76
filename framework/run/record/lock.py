"""Lock of a run folder: a file lock that ends with its process, and a heartbeat for hosts that do not share locks.

The lock file names host and process. On one host, and on network file systems that support locks, the system releases
the lock when the process ends, however it ends. Elsewhere the file's modification time decides: it is renewed every few
seconds, and if that stops the other host has died. Loads no torch.
"""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.errors import Problem, RequestError

FILE = ".lock"
BEAT = 10.0
"""Seconds between two heartbeats."""
STALE = 60.0
"""Seconds without a heartbeat after which another host counts as dead. NFS may show a time that is 60 s old (its
`acregmax`), but refreshes it when a file is opened, as here."""
KEY = "training.output_dir"


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Lock the folder within the block. Raises RequestError if another run has it, naming host and pid."""
    descriptor = _taken(folder)
    # a worker that outlives the run must not keep the lock
    os.register_at_fork(after_in_child=lambda: _let_go(descriptor))
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(descriptor, done), daemon=True, name="heartbeat")
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()  # while it is locked: a waiting process then notices that the file was replaced
        _held.discard(descriptor)
        os.close(descriptor)


def refuse_taken(folder: Path) -> None:
    """Raise RequestError if a run has locked the folder. Writes nothing."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        _require_free(folder, descriptor, waits=False)
    finally:
        os.close(descriptor)


_held: set[int] = set()


def _let_go(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _taken(folder: Path) -> int:
    """Lock the file and return its descriptor."""
    while True:
        try:
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            message = f"{folder / FILE}, the lock file of the folder, cannot be opened: {error.strerror}"
            raise RequestError([Problem(KEY, message, expected="a folder where files can be written")]) from None
        try:
            _require_free(folder, descriptor, waits=True)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(folder / FILE, follow_symlinks=False)):
                    _sign(descriptor)
                    _held.add(descriptor)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner has removed it meanwhile


def _require_free(folder: Path, descriptor: int, waits: bool) -> None:
    """Lock the file. Raises RequestError if another run has it, according to the system or, with `waits`, to another
    host's heartbeat, which is awaited."""
    known = _read(descriptor)
    who = f"process {known.get('pid', '?')} on {known.get('host', '?')} is training in {folder}"
    taken = Problem(KEY, who, expected="another folder, or wait until that run has ended")
    is_of_here = known.get("host", socket.gethostname()) == socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_of_here:
            return  # a process of this host that held it has ended
    except BlockingIOError:
        raise RequestError([taken]) from None
    except OSError:  # a file system without locks
        if is_of_here and not _is_alive(known.get("pid")):
            return
        if is_of_here:
            raise RequestError([taken]) from None
    if waits and _beats(folder):
        raise RequestError([taken])


def _beats(folder: Path) -> bool:
    """Whether the lock has a heartbeat, observed for as long as that takes. It stops when its host dies."""
    seen, ends = None, time.monotonic() + STALE
    while time.monotonic() < ends:
        descriptor = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            beat = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        if seen not in (None, beat):
            return True
        if _now(folder) - beat >= STALE:
            return False
        seen = beat
        time.sleep(BEAT / 10)
    return False


def _now(folder: Path) -> float:
    """The time by the file system's clock, which may differ from the host's; the host's time if the disk is full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _read(descriptor: int) -> dict[str, Any]:
    try:
        known = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _sign(descriptor: int) -> None:
    """Write host and process into the lock file. On a full disk they are missing, but the lock holds."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)


def _is_alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _beat(descriptor: int, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(descriptor)

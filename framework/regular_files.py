"""Reading of files that a request, a run or a model names: regular ones alone, and no more bytes than they may have.

A FIFO would be waited for without end, a device has no end or acts when it is opened.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 64 * 2**20
"""Of a document that is read whole. The largest of ours, `plan.json`, has less than a hundredth of it."""
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading bytes. Raises OSError, with `strerror` for a message, where it is no regular file."""
    _require_regular(path, os.stat(path).st_mode)  # before it is opened, which some devices answer to
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)  # it may have been exchanged
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, errors: str = "strict", most: int = MOST_BYTES) -> str:
    """The UTF-8 text of a file of at most so many bytes, its undecodable bytes treated as `errors` says.

    Raises OSError, with `strerror` for a message, where it is larger or no regular file, and UnicodeDecodeError.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data.decode("utf-8", errors)


def kind_of(path: Path) -> str | None:
    """`a FIFO` and the like, of what a path leads to, by a link too; None for files, folders and nothing."""
    try:
        return _kind(os.stat(path).st_mode)
    except OSError:
        return None


def special_files(folder: Path) -> list[str]:
    """What no library may be given to read in a folder: `name (a FIFO)` for each entry that is no file or folder."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
    kinds = ((entry.name, _kind(entry.stat().st_mode)) for entry in entries if not _is_broken_link(entry))
    return [f"{name} ({kind})" for name, kind in kinds if kind]


def _is_broken_link(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := _kind(mode):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _kind(mode: int) -> str | None:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)

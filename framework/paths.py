"""Paths that a request, a run or a model names: safe reading, and the nearest existing path for a wrong one.

Only regular files are read, up to a maximum size: opening a FIFO can block forever; a device may have no end, or act
when it is opened.
"""

import errno
import os
import stat
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 64 * 2**20
"""Limit for a document that is read whole. The largest of ours, `plan.json`, has less than a hundredth of it."""
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes. Raises OSError, with `strerror` as the message, if it is not a regular file."""
    _require_regular(path, os.stat(path).st_mode)  # before it is opened, since that makes some devices act
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)  # it may have been replaced meanwhile
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, errors: str = "strict", most: int = MOST_BYTES) -> str:
    """Read the UTF-8 text of a file of at most `most` bytes; undecodable bytes are handled as `errors` says.

    Raises OSError, with `strerror` as the message, if it is larger or not a regular file, and UnicodeDecodeError.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data.decode("utf-8", errors)


def kind_of(path: Path) -> str | None:
    """`a FIFO` and the like for a path, following links; None for files, folders and missing paths."""
    try:
        return _kind(os.stat(path).st_mode)
    except OSError:
        return None


def special_files(folder: Path) -> list[str]:
    """`name (a FIFO)` for each entry of a folder that is neither file nor folder, which no library may be given to
    read."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
    existing = (entry for entry in entries if not entry.is_symlink() or os.path.exists(entry.path))
    kinds = ((entry.name, _kind(entry.stat().st_mode)) for entry in existing)
    return [f"{name} ({kind})" for name, kind in kinds if kind]


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := _kind(mode):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _kind(mode: int) -> str | None:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def path_like(
    written: str | Path, accepts: Callable[[Path], bool] = Path.exists, endings: tuple[str, ...] = ()
) -> str | None:
    """The most similar existing path that `accepts` takes, comparing names without one of `endings`. A wrong folder in
    the path is corrected first. None if nothing is similar, or the written path is invalid."""
    try:
        return _like(str(written), accepts, endings)
    except (OSError, ValueError, RuntimeError):
        return None


def _like(written: str, accepts: Callable[[Path], bool], endings: tuple[str, ...]) -> str | None:
    above, name = os.path.split(written.rstrip("/"))
    if not name:
        return None
    if not _found(above).is_dir():
        near = _like(above, Path.is_dir, ())
        if near is None or accepts(_found(near, name)):
            return near and os.path.join(near, name)
        above = near
    similar = {_less(file.name, endings): file.name for file in _found(above).glob("*") if accepts(file)}
    close = get_close_matches(_less(name, endings), similar, 1)
    return os.path.join(above, similar[close[0]]) if close else None


def _found(*parts: str) -> Path:
    return Path(*parts).expanduser()


def _less(name: str, endings: tuple[str, ...]) -> str:
    return next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), name)

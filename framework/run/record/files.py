"""Files written whole or not at all, and never through a link that lies in their place. Loads no torch."""

import os
import shutil
from pathlib import Path

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def aside_of(target: Path) -> Path:
    """Where a file or folder is written before it takes its name."""
    return target.with_name(f".{target.name}.incomplete")


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all. A link in its place is replaced, not followed. Raises OSError."""
    aside = aside_of(file)
    discard(aside)
    try:
        descriptor = os.open(aside, os.O_WRONLY | _NEW, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as opened:
            opened.write(text)
        os.replace(aside, file)
    except OSError:
        discard(aside)
        raise


def append_line(file: Path, line: str) -> None:
    """Append a line whole or not at all, where no link is followed. Raises OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        size, data = os.fstat(descriptor).st_size, f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)  # what a full disk has taken of it
            raise
    finally:
        os.close(descriptor)


def discard(path: Path) -> bool:
    """Delete a file, a link or a folder with what is in it, as far as that can be; whether nothing is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
    return not os.path.lexists(path)

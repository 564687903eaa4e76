"""What lies next to a path that leads nowhere."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path


def path_like(
    written: str | Path, accepts: Callable[[Path], bool] = Path.exists, endings: tuple[str, ...] = ()
) -> str | None:
    """The path that was probably meant: of those that `accepts` takes, the one whose name, less one of `endings`, is
    most like the written one. A folder on the way that leads nowhere is looked for first. None where nothing is alike,
    or what is written cannot be a name."""
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
    beside = {_less(file.name, endings): file.name for file in _found(above).glob("*") if accepts(file)}
    close = get_close_matches(_less(name, endings), beside, 1)
    return os.path.join(above, beside[close[0]]) if close else None


def _found(*parts: str) -> Path:
    return Path(*parts).expanduser()


def _less(name: str, endings: tuple[str, ...]) -> str:
    return next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), name)

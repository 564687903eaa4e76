"""Where caches are, and what our own code is, so that nothing that another version made is ever taken from one."""

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/tunesmith/<name>`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith" / name


@cache
def our_files() -> Mapping[str, tuple[int, int]]:
    """Size and time of change (ns) of each file of the package."""
    package = Path(__file__).resolve().parent
    files = {str(file.relative_to(package)): file.stat() for file in sorted(package.rglob("*.py"))}
    return {name: (facts.st_size, facts.st_mtime_ns) for name, facts in files.items()}


@cache
def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """The installed version of each package, None where there is none."""
    return {name: _version(name) for name in packages}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

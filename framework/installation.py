"""Locations of the package's files and caches, and installed versions of other packages."""

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from framework.errors import Problem, RequestError


def shipped(folder: str) -> Path:
    """The shipped folder of that name: inside an installed package, next to the package in a checkout.

    Inside is tried first, because next to an installed package is `site-packages`, where a folder called `conf` may
    belong to another project.
    """
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


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
    """The installed version of each package, None if it is not installed."""
    return {name: _version(name) for name in packages}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


PACKAGE = "tunesmith"
CHECKED = ("torch", "transformers", "peft", "accelerate")


def require_versions() -> None:
    """Raise RequestError naming every package of `CHECKED` that is missing or has an unsupported version."""
    if problems := version_problems():
        raise RequestError(problems)


def version_problems() -> list[Problem]:
    """One problem for each such package; none for a source tree that was not installed, which has no metadata."""
    try:
        wanted = [Requirement(text) for text in requires(PACKAGE) or ()]
    except PackageNotFoundError:
        return []
    problems = []
    for requirement in wanted:
        if requirement.name not in CHECKED or requirement.marker is not None:
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            problems.append(_version_problem(requirement, "is not installed"))
            continue
        # builds of torch have versions such as 2.13.0+cu130 and 2.14.0a0+git1234, which count as their release
        if not requirement.specifier.contains(Version(found).base_version):
            problems.append(_version_problem(requirement, f"{found} is installed, which {PACKAGE} does not run with"))
    return problems


def _version_problem(requirement: Requirement, found: str) -> Problem:
    expected = f"{requirement.name}{requirement.specifier}: pip install '{requirement}'"
    return Problem("", f"{requirement.name} {found}", expected=expected)

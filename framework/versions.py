"""The versions of torch, transformers, peft and accelerate that this package runs with, held to those installed.

Read from package metadata, so that a wrong version is told before one of them is imported and fails inside.
"""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from framework.errors import Problem, RequestError

PACKAGE = "tunesmith"
CHECKED = ("torch", "transformers", "peft", "accelerate")


def require_versions() -> None:
    """Raises RequestError naming every package of `CHECKED` that is missing or of a version that is not supported."""
    if problems := version_problems():
        raise RequestError(problems)


def version_problems() -> list[Problem]:
    """One problem for each; none for a source tree that was not installed, which has no metadata to read."""
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
            problems.append(_problem(requirement, "is not installed"))
            continue
        # builds of torch are versions such as 2.13.0+cu130 and 2.14.0a0+git1234, which belong to their release
        if not requirement.specifier.contains(Version(found).base_version):
            problems.append(_problem(requirement, f"{found} is installed, which {PACKAGE} does not run with"))
    return problems


def _problem(requirement: Requirement, found: str) -> Problem:
    expected = f"{requirement.name}{requirement.specifier}: pip install '{requirement}'"
    return Problem("", f"{requirement.name} {found}", expected=expected)

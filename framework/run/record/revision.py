"""Commit of the working directory, found without running programs that its repository configures. Loads no torch.

Git runs programs named in a repository's configuration: file monitors, filters, hooks, fetches of missing objects. So
files are compared with a minimal configuration in a temporary git folder.
"""

import os
import subprocess
import tempfile
from pathlib import Path

_SECONDS = 5
_CONFIG = """\
[core]
repositoryformatversion = 0
bare = false
[diff]
ignoreSubmodules = dirty
"""
"""Submodules have their own configuration, so only their commits are compared."""


def describe_revision() -> str | None:
    """The commit's full name, with `-dirty` if tracked files differ from it; None outside of a repository."""
    places = ("--git-path", "objects", "--git-path", "index")  # rev-parse runs no program
    asked = _git({}, "rev-parse", "--path-format=absolute", "--show-toplevel", *places, "HEAD")
    if asked is None or len(lines := asked.splitlines()) != 4:
        return None
    tree, objects, index, commit = lines
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        (Path(folder) / "refs").mkdir()
        (Path(folder) / "HEAD").write_text(f"{commit}\n")
        (Path(folder) / "config").write_text(_CONFIG)
        variables = {"DIR": folder, "WORK_TREE": tree, "OBJECT_DIRECTORY": objects, "INDEX_FILE": index}
        place = {f"GIT_{name}": value for name, value in variables.items()}
        return _git(place, "describe", "--always", "--dirty", "--abbrev=40") or commit


def _git(place: dict[str, str], *arguments: str) -> str | None:
    """Output of a read-only git command; None if it fails. Git's environment variables are ignored."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-pager", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    environment = {**kept, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", **place}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

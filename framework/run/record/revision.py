"""The commit of the working directory, without running what its repository configures. Loads no torch.

Git runs programs that the configuration of a repository names: monitors of files, filters, hooks, fetches of missing
objects. So files are compared under a configuration of ours, in a git folder that has nothing else in it.
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
"""Submodules have a configuration of their own; only their commits are compared."""


def describe_revision() -> str | None:
    """The commit's full name, with `-dirty` where tracked files differ from it; None outside of a repository."""
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


def _git(place: dict[str, str], *words: str) -> str | None:
    """What a command of git that reads alone prints; None where it fails. Variables of git count for nothing here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-pager", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]
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

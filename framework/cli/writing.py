"""Files that a verb writes next to its result. One that has no place is refused before any work; where writing fails
later, the result is printed all the same."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from framework.beside import path_like
from framework.cli.printing import complain
from framework.errors import Problem, RequestError
from framework.regular_files import kind_of

NOT_WRITTEN = RequestError.exit_code


def check_writable(file: Path | None, option: str) -> None:
    """Raises RequestError where there is no place for a file that is asked for, before anything else takes time."""
    if file is None:
        return
    folder, kind = file.absolute().parent, "a folder" if file.is_dir() else kind_of(file)
    reason = None if folder.is_dir() else f"there is no folder {folder}"
    if kind not in (None, "a character device"):  # those take bytes at once: a terminal, /dev/null
        reason = f"it is {kind}"
    if reason:
        raise RequestError([_unwritten(file, option, reason)])


def written(file: Path | None, option: str, text: Callable[[], str]) -> list[Problem]:
    """Writes the text to the file, where one is asked for. What is returned kept it from that, for `exit_code`."""
    if file is None:
        return []
    content = text()
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK  # it may be a FIFO by now
        descriptor = os.open(file, flags, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as opened:  # names of files may be no text
            opened.write(content)
    except OSError as error:
        return [_unwritten(file, option, error.strerror or str(error))]
    return []


def as_document(problems: Sequence[Problem]) -> dict[str, object]:
    """What the one document of --json has besides the result where a file was not written."""
    return {"errors": [problem.to_json() for problem in problems]} if problems else {}


def exit_code(problems: Sequence[Problem], code: int) -> int:
    """The exit code: `code`, or that of files which could not be written, each told on a line of stderr."""
    for problem in problems:
        nearest = f"; did you mean {problem.nearest}" if problem.nearest else ""
        complain(f"{problem.key}: {problem.message}{nearest}", with_traceback=False)
    return NOT_WRITTEN if problems else code


def _unwritten(file: Path, option: str, reason: str) -> Problem:
    folder = None if file.absolute().parent.is_dir() else path_like(file.parent, Path.is_dir)
    nearest = str(Path(folder) / file.name) if folder else None
    expected = "a file in a folder that exists and can be written to"
    return Problem(option, f"{file} cannot be written: {reason}", None, expected, nearest)

"""Command line: parsing, printing and exit codes. Each command imports its dependencies when it runs."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise

from typer import TyperException

from framework.cli.app import app
from framework.cli.printing import complain, print_json, print_problems, say
from framework.errors import Interrupted, Problem, RequestError, TunesmithError
from framework.schema.spelling import alike
from framework.terminal import visible_streams

__all__ = ["app", "main"]

_VERBS = tuple(
    str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback
)
READER_LEFT = 141
"""A shell's exit code for SIGPIPE."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OUT_OF_REACH = (errno.ENAMETOOLONG, errno.EACCES)
"""Errors that any access to a typed path may raise."""
_SHOWN = 120
"""Characters of such a path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1, 2, 3, 4 or 130. No traceback without --debug."""
    typed = _with_folders(sys.argv[1:] if arguments is None else arguments)
    with visible_streams():
        try:
            code = app(
                [argument for argument in typed if argument != "--debug"], prog_name="tunesmith", standalone_mode=False
            )
            sys.stdout.flush()
        except (Exception, SystemExit) as error:
            return _failed(error, typed)
    return code if isinstance(code, int) else 0


def _with_folders(arguments: Sequence[str]) -> list[str]:
    """Replace `--config-dir DIR` by an override, which child processes also receive."""
    typed, folders = list[str](), list[str]()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--config-dir":
            folders.append(f"config_dir={value if equals else next(rest, '')}")
        else:
            typed.append(argument)
    return [*typed, *folders]


def _failed(error: Exception | SystemExit, typed: Sequence[str]) -> int:
    """Print the error that ended a command, and return its exit code."""
    match error:
        case RequestError():
            if error.is_reported and "--json" not in typed:
                return error.exit_code
            return _refused(error.problems, error.exit_code, typed)
        case TyperException():
            message = error.format_message()
            verb = next((argument for argument in typed if not argument.startswith("-")), "")
            if message.startswith("Missing argument"):
                message = f"{message.removesuffix('.')}: `tunesmith {verb} --help` explains it"
            message, _, possible = message.partition(" (Possible options: ")
            close = alike(message.rpartition("--")[2], [option.strip("-,)") for option in possible.split()], 1, 0.6)
            nearest = suggestion(message, typed, _VERBS) or (f"--{close[0]}" if close else None)
            return _refused((Problem("", message, nearest=nearest),), 2, typed)
        case Interrupted():  # requested by the user, not an error
            with contextlib.suppress(OSError):  # the terminal may be closed
                if not error.is_reported:
                    say(str(error))
            return _documented(str(error), error.exit_code, typed)
        case TunesmithError():
            if not error.is_reported or "--debug" in typed:
                complain(str(error), "--debug" in typed)
            return _documented(str(error), error.exit_code, typed)
        case SystemExit(code=0 | None):  # shell completion
            return 0
        case BrokenPipeError() | SystemExit():  # the reader has closed its end, which typer may turn into an exit
            return _unprinted(BrokenPipeError(), typed)
        case OSError(errno=number) if number in _NO_ROOM:
            return _unprinted(error, typed)
        case OSError(errno=number) if number in _OUT_OF_REACH:
            return _refused((Problem("", f"{error.strerror}: {str(error.filename)[:_SHOWN]}"),), 2, typed)
        case _:
            detail = f"internal fault: {type(error).__name__}: {error}".partition("\n")[0]
            complain(f"{detail} (--debug shows where; please report it)", "--debug" in typed)
            return _documented(detail, 1, typed)


def _refused(problems: Sequence[Problem], code: int, typed: Sequence[str]) -> int:
    """Print the problems of a request, and return the exit code."""
    if "--json" in typed:
        return _documented(problems, code, typed)
    print_problems(problems)
    return code


def _documented(found: Sequence[Problem] | str, code: int, typed: Sequence[str]) -> int:
    """Print the problems as the one document of --json, and return the exit code."""
    problems = [Problem("", found)] if isinstance(found, str) else found
    try:
        if "--json" in typed:
            print_json({"errors": [problem.to_json() for problem in problems]})
            sys.stdout.flush()
    except OSError as error:
        return _unprinted(error, typed)
    return code


def _unprinted(error: OSError, typed: Sequence[str]) -> int:
    """Exit code after a failed write of the output; nothing more is written there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return READER_LEFT
    complain(f"not all could be written: {error.strerror}", "--debug" in typed)
    return RequestError.exit_code


_TAKE_KEYS = ("train", "plan", "fit", "check", "data", "show", "diff")
"""Commands that compose a recipe."""
_OTHER_VERBS = {
    "version": "--version",
    "help": "--help",
    "generate": "predict",
    "infer": "predict",
    "upload": "push",
    "publish": "push",
}
"""Command names of other tools -> the command here."""
_RECIPE = ("-c", "--config", "--recipe", "--config-file", "--config_file", "--config-name")
_OUTPUT = ("-o", "--output", "--out", "--file")
_PRESETS = ("--config-path", "--config_dir", "--configdir")


def suggestion(message: str, typed: Sequence[str], verbs: Iterable[str]) -> str | None:
    """What to type instead of the unknown command or option in `message`; None if nothing is similar."""
    verb = next((argument for argument in typed if not argument.startswith("-")), "")
    if "No such command" in message:
        return _OTHER_VERBS.get(verb) or next(iter(get_close_matches(verb, verbs, 1)), None)
    if "No such option" not in message or verb not in (*_TAKE_KEYS, "init"):
        return None
    option = next(
        (argument for argument in typed if argument.startswith("-") and argument.partition("=")[0] in message.split()),
        "",
    )
    name, _, value = option.partition("=")
    after = dict(pairwise(typed)).get(option, "")
    value = value or ("" if after.startswith("-") else after)
    if verb == "init":
        return f"{value or 'recipe.yaml'}, the recipe to write, without an option" if name in _OUTPUT else None
    if name in _RECIPE:
        return f"{value or 'RECIPE'}, which comes first, without an option"
    if name in _PRESETS:
        return f"--config-dir {value or 'DIR'}, a folder of presets"
    key = _intended_key(name.lstrip("-").replace("-", "_"))
    return f"{key}={value or 'VALUE'}" if key else None


def _intended_key(name: str) -> str | None:
    from framework.compose.shipped import GROUPS
    from framework.schema.keys import unknown

    if name in GROUPS or not name:
        return name or None
    return unknown(tuple(name.split(".")))[1]

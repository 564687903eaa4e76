"""The command line: parses, prints, exits, and nothing else. Each verb imports what it needs when it runs."""

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
from framework.terminal import visible_streams

__all__ = ["app", "main"]

_VERBS = tuple(
    str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback
)
READER_LEFT = 141
"""What a shell makes of SIGPIPE."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OUT_OF_REACH = (errno.ENAMETOOLONG, errno.EACCES)
"""How any look at a path that was typed may end, before anything is known to be there."""
_SHOWN = 120
"""Characters of such a path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1, 2, 3, 4 or 130. No traceback without --debug."""
    words = _with_folders(sys.argv[1:] if arguments is None else arguments)
    with visible_streams():
        try:
            code = app([word for word in words if word != "--debug"], prog_name="tunesmith", standalone_mode=False)
            sys.stdout.flush()
        except (Exception, SystemExit) as error:
            return _failed(error, words)
    return code if isinstance(code, int) else 0


def _with_folders(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--config-dir DIR` as the word that composing reads, which goes on to other processes too."""
    words, folders = list[str](), list[str]()
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config-dir":
            folders.append(f"config_dir={value if equals else next(rest, '')}")
        else:
            words.append(word)
    return [*words, *folders]


def _failed(error: Exception | SystemExit, words: Sequence[str]) -> int:
    """The exit code of a command that `error` ended, which is said first."""
    match error:
        case RequestError():
            if error.is_reported and "--json" not in words:
                return error.exit_code
            return _refused(error.problems, error.exit_code, words)
        case TyperException():
            message, verb = error.format_message(), next((word for word in words if not word.startswith("-")), "")
            if message.startswith("Missing argument"):
                message = f"{message.removesuffix('.')}: `tunesmith {verb} --help` says what it is"
            return _refused((Problem("", message, nearest=meant(message, words, _VERBS)),), 2, words)
        case Interrupted():  # asked for, and no error
            with contextlib.suppress(OSError):  # a terminal that has gone is why
                if not error.is_reported:
                    say(str(error))
            return _documented(str(error), error.exit_code, words)
        case TunesmithError():
            if not error.is_reported or "--debug" in words:
                complain(str(error), "--debug" in words)
            return _documented(str(error), error.exit_code, words)
        case SystemExit(code=0 | None):  # a shell has been given what it may offer
            return 0
        case BrokenPipeError() | SystemExit():  # our reader has left, which typer may turn into an exit
            return _unprinted(BrokenPipeError(), words)
        case OSError(errno=number) if number in _NO_ROOM:
            return _unprinted(error, words)
        case OSError(errno=number) if number in _OUT_OF_REACH:
            return _refused((Problem("", f"{error.strerror}: {str(error.filename)[:_SHOWN]}"),), 2, words)
        case _:
            detail = f"internal fault: {type(error).__name__}: {error}".partition("\n")[0]
            complain(f"{detail} (--debug shows where; please report it)", "--debug" in words)
            return _documented(detail, 1, words)


def _refused(problems: Sequence[Problem], code: int, words: Sequence[str]) -> int:
    """The exit code, after the problems of a request."""
    if "--json" in words:
        return _documented(problems, code, words)
    print_problems(problems)
    return code


def _documented(found: Sequence[Problem] | str, code: int, words: Sequence[str]) -> int:
    """The exit code, after the one document of --json of what kept a verb from its own."""
    problems = [Problem("", found)] if isinstance(found, str) else found
    try:
        if "--json" in words:
            print_json({"errors": [problem.to_json() for problem in problems]})
            sys.stdout.flush()
    except OSError as error:
        return _unprinted(error, words)
    return code


def _unprinted(error: OSError, words: Sequence[str]) -> int:
    """The exit code where what was printed did not arrive; nothing more is written there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return READER_LEFT
    complain(f"not all could be written: {error.strerror}", "--debug" in words)
    return RequestError.exit_code


_TAKE_KEYS = ("train", "plan", "fit", "check", "data", "show", "diff")
"""Verbs that compose a recipe."""
_OTHER_VERBS = {
    "version": "--version",
    "help": "--help",
    "generate": "predict",
    "infer": "predict",
    "upload": "push",
    "publish": "push",
}
"""What other tools call it -> what it is here."""
_RECIPE = ("-c", "--config", "--recipe", "--config-file", "--config_file", "--config-name")
_PRESETS = ("--config-path", "--config_dir", "--configdir")


def meant(message: str, words: Sequence[str], verbs: Iterable[str]) -> str | None:
    """The words to type instead of the unknown verb or option that `message` names; None where nothing is alike."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if "No such command" in message:
        return _OTHER_VERBS.get(verb) or next(iter(get_close_matches(verb, verbs, 1)), None)
    if "No such option" not in message or verb not in _TAKE_KEYS:
        return None
    option = next((word for word in words if word.startswith("-") and word.partition("=")[0] in message.split()), "")
    name, _, value = option.partition("=")
    after = dict(pairwise(words)).get(option, "")
    value = value or ("" if after.startswith("-") else after)
    if name in _RECIPE:
        return f"{value or 'RECIPE'}, which stands first and takes no option"
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

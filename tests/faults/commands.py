"""Commands run in this process, with checks of what no command may do, whatever its arguments."""

import contextlib
import getpass
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import typer

from framework import cli
from framework.terminal import OBEYED

SECONDS = 10
"""Of processor time that a command may take; what waits without any is ended by pytest's own timeout."""
_VERBS = typer.main.get_command(cli.app)
"""Made once: typer makes it anew for each command, which takes longer than most of the commands."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 1}
"""Events of Python that change the disk, and how many paths each begins with."""
_changed: list[str] | None = None
"""Paths written to, made or removed since they are listened for."""


class Done(NamedTuple):
    """Result of a command."""

    code: int
    out: str
    err: str


class Hangs(BaseException):
    """A command that takes too long. No `except Exception` of ours stops it."""


def touched(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    """The absolute paths that an event of Python writes to, makes or removes."""
    if event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & _WRITING:
        yield os.path.abspath(os.fsdecode(arguments[0]))
    for path in arguments[: _CHANGES.get(event, 0)]:
        if isinstance(path, str | bytes | os.PathLike):
            yield os.path.abspath(os.fsdecode(path))


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _changed is not None:
        _changed.extend(touched(event, arguments))


sys.addaudithook(_listen)  # for good: a hook cannot be taken out again


@contextlib.contextmanager
def changes() -> Iterator[list[str]]:
    """The absolute paths that this process writes to, makes or removes inside, as far as Python knows of them."""
    global _changed
    _changed = found = list[str]()
    try:
        yield found
    finally:
        _changed = None


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises Hangs inside where it takes longer than a command may."""

    def stop(*_: Any) -> None:
        raise Hangs(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(*arguments: str, codes: Sequence[int] = (0, 2), writes: Sequence[Path] = ()) -> Done:
    """One command. Its code is one of `codes`, it explains each but 0, shows no traceback and steers no terminal,
    prints one document with `--json`, takes no longer than it may, and changes nothing but in `writes` and caches."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(cli, "app", _VERBS))
        stack.enter_context(patch.multiple(sys, stdin=io.TextIOWrapper(io.BytesIO()), stdout=out, stderr=err))
        changed = stack.enter_context(changes())
        stack.enter_context(in_time())
        code = cli.main([*arguments])
    done = Done(code, out.getvalue(), err.getvalue())
    where = f"{arguments}: {done}"
    assert code in codes, where
    assert "\nTraceback" not in f"\n{done.err}", where
    assert not OBEYED.search(done.out + done.err), where
    if "--json" in arguments:
        assert isinstance(json.loads(done.out), dict), where
    elif code:
        assert done.err, where
    compiler = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")  # torch makes it when first imported
    places = [Path(place).absolute() for place in (*writes, os.environ["XDG_CACHE_HOME"], os.devnull, compiler)]
    changed = [path for path in changed if path != tempfile.gettempdir()]  # a file there that has no name
    modules = [f"{entry}{os.sep}" for entry in sys.path if entry]  # whose bytecode Python keeps next to them
    changed = [path for path in changed if "__pycache__" not in path or not path.startswith((*modules,))]
    stray = [path for path in changed if not any(Path(path).is_relative_to(place) for place in places)]
    assert not stray, (arguments, stray)
    return done

"""Command lines of the Python processes that this package starts for its own work. Loads no torch."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).absolute().parents[3])
# The package is imported from where it lies here, which need not be on the other process's path (a checkout that is
# not installed); its folder then goes to the end, where it stands in front of no other module.
_IMPORT = f"import sys, typing; sys.path.insert(0, {_ROOT!r}); import framework; sys.path.append(sys.path.pop(0)); "


def python_command(code: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Command line of a Python that runs `code`, with `arguments` in `sys.argv[1:]` and the interpreter's `flags`.

    `framework` is this very package there. Nothing is imported from the working directory, whatever modules it holds
    (`-P`); `PYTHONPATH` counts as it does here.
    """
    return [sys.executable, "-P", *flags, "-c", _IMPORT + code, *arguments]


def train_command(*arguments: str) -> list[str]:
    """Command line of `tunesmith train` with these words after it."""
    return python_command("from framework.__main__ import main; sys.exit(main())", "train", *arguments)

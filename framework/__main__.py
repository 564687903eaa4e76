"""`python -m framework` is `tunesmith`."""

import os
import sys


def main() -> int:
    """Run one command and return its exit code, 130 also where Ctrl-C comes while the first modules are imported.

    Processes that it starts, and those that they start, import nothing from the working directory.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from framework.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _without_working_directory() -> None:
    """Take what `-m` has put first, the working directory, off the path; a checkout that this is goes to its end."""
    first = sys.path.pop(0)
    if os.path.samefile(first or ".", os.path.dirname(os.path.dirname(os.path.abspath(__file__)))):
        sys.path.append(first)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        _without_working_directory()
    sys.exit(main())

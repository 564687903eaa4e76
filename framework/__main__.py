"""`python -m framework` is `tunesmith`."""

import sys


def main() -> int:
    """Runs one command and returns its exit code, 130 also where Ctrl-C comes while the first modules are imported."""
    try:
        from framework.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""`python -m framework` is `tunesmith`."""

import gc
import os
import sys

_LONG = {"train", "plan", "fit", "check", "data", "predict", "merge", "doctor", "report", "explain", "diff"}
_LONG |= {"init", "convert", "evaluate", "export", "push", "levers", "show", "list", "schema"}
_BRIEF = {"--help", "-h", "--quick", "--quiet"}


def main() -> int:
    """Run one command and return its exit code, which is 130 also for Ctrl-C during the first imports.

    Child processes, and theirs, import nothing from the working directory.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from framework.activity import shown

        with shown("starting", is_wanted=_is_long(sys.argv[1:])):
            from framework.cli import main as run

            return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        gc.freeze()  # the interpreter ends, and would go through all that was imported: 1.4 s after `train`


def _is_long(arguments: list[str]) -> bool:
    """Whether a command may take long. If several processes train together, only the first one reports it."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return not _LONG.isdisjoint(arguments[:1]) and not _BRIEF & {*arguments} and rank == "0"


def main_of_module() -> int:
    """Run `main` for `python -m`, which puts the working directory first on the path: remove it, or move it to the end
    if it is this package's own checkout."""
    if not sys.flags.safe_path:
        first = sys.path.pop(0)
        if os.path.samefile(first or ".", os.path.dirname(os.path.dirname(os.path.abspath(__file__)))):
            sys.path.append(first)
    return main()


if __name__ == "__main__":
    sys.exit(main_of_module())

"""The verb that shows a run. It loads no torch."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.printing import print_text
from framework.cli.writing import check_writable, written
from framework.errors import Problem, RequestError


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write; else RUN/report.html.")] = None,
) -> None:
    """Write a run as one HTML page that needs nothing else: plan next to measured, loss, memory. Prints its path."""
    print_text(str(write_report(run, output)))


def write_report(run: Path, output: Path | None) -> Path:
    """Write the page of a run and return where it is. Raises RequestError for a folder of no run, and where it cannot
    be written."""
    from framework.reports.run_files import read_run
    from framework.reports.run_page import run_page
    from framework.run.record.run_folder import PAGE

    check_writable(output, "--output")
    page, file = run_page(read_run(run)), output or run / PAGE
    if output is None and file.is_symlink():
        problem = Problem("RUN", f"{file} is a link to {file.readlink()}", expected="a file, or --output FILE")
        raise RequestError([problem])
    check_writable(file, "--output")
    if missed := written(file, "--output", lambda: page):
        raise RequestError(missed)
    return file

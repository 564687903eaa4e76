"""Commands that read a run folder: `explain` and `report`. They load no torch."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from framework.activity import shown
from framework.cli.arguments import Json
from framework.cli.printing import check_writable, print_json, print_prose, print_text, print_warnings, written
from framework.errors import Problem, RequestError


def explain(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, a log file, or - for standard input.")],
    run: Annotated[Path | None, typer.Option("--run", help="The folder of the run that a log is of.")] = None,
    as_json: Json = False,
) -> None:
    """Say why memory ran out and where, with the arithmetic, and what to change. Exit 2: no failure of a known kind."""
    from framework.memory.explain import explain_evidence
    from framework.memory.explain.evidence import Evidence, gather, plan_of, read_standard_input
    from framework.memory.explain.text import explanation_lines

    if source == "-":
        plan = plan_of(run) if run else None
        evidence = Evidence(read_standard_input(), plan=plan)
    else:
        evidence = gather(Path(source), run)
    explanation = explain_evidence(evidence)
    if explanation.lacks_savings:
        from framework.run.planning.what_if import savings_of_run

        folder = run or (Path(source) if Path(source).is_dir() else Path(source).parent)
        with shown("rehearsing what each setting would save"):
            found = savings_of_run(folder)
        explanation = explain_evidence(replace(evidence, plan=found)) if found is not None else explanation
    print_warnings([evidence.unread] if evidence.unread else [])
    if as_json:
        print_json(explanation.to_json())
    else:
        print_prose("\n".join(explanation_lines(explanation)))


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write; else RUN/report.html.")] = None,
) -> None:
    """Write a run as one HTML page that needs nothing else: plan next to measured, loss, memory. Prints its path."""
    print_text(str(write_report(run, output)))


def write_report(run: Path, output: Path | None) -> Path:
    """Write the page of a run and return its path. Raises RequestError for a folder without a run, and if it cannot be
    written."""
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

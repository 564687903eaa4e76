"""The verb that shows the rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from framework.cli.arguments import Json, Overrides, Recipe
from framework.cli.plan import decided
from framework.cli.printing import print_json, print_warnings, stdout
from framework.cli.writing import as_document, check_writable, exit_code, written
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.run.preview import Preview


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows that are shown.")] = 3,
    split: Annotated[str, typer.Option("--split", help="train or eval.")] = "train",
    whole: Annotated[bool, typer.Option("--all", help="Of a stream: read and count a whole epoch.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page that needs nothing else.")] = None,
    as_json: Json = False,
) -> int:
    """Show the rows as the model will see them: supervised tokens, lengths, what is cut, padding. Loads no weights."""
    from framework.checks import TRAIN, check_request, placing

    if split not in ("train", "eval"):
        raise RequestError([Problem("--split", f"there is no split {split!r}", None, "train or eval")])
    report = check_request(recipe, overrides or (), None, TRAIN)
    print_warnings(report.warnings)
    if report.composition is None:
        raise RequestError(report.problems)
    check_writable(html, "--html")
    composition, _ = decided(report.composition)
    from framework.run.preview import preview

    with placing(composition.origins):
        found = preview(composition.config, split, rows, whole)
    missed = written(html, "--html", lambda: _page(composition.recipe, found))
    if as_json:
        print_json({"recipe": composition.recipe, **found.to_json(), **as_document(missed)})
    else:
        _print(composition.recipe, found)
    return exit_code(missed, 0)


def _page(title: str, found: "Preview") -> str:
    from framework.reports.rows_page import data_page

    return data_page(title, found)


def _print(title: str, found: "Preview") -> None:
    from framework.reports.rows import data_lines, marks_for

    console = stdout()
    is_coloured = console.is_terminal and console.color_system is not None and not console.no_color
    for line in data_lines(title, found, console.width, marks_for(console.encoding, is_coloured)):
        console.print(line)

"""The verb that proposes settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.plan import DOES_NOT_FIT, checked
from framework.cli.printing import print_json, say, stdout
from framework.cli.writing import as_document, check_writable, exit_code, written
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.compose import Composition
    from framework.memory.search.found import Found


def fit(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the proposal as a recipe, a .yaml.")] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="A key or section that stays as it is; `written`: all that the request writes."),
    ] = None,
    set_free: Annotated[
        list[str] | None,
        typer.Option(
            "--set-free", help="A key that may change the training result: optimizer, dtype, q_lora or length."
        ),
    ] = None,
    allow: Annotated[
        str | None, typer.Option("--allow", help="`inexact`: all keys that --set-free takes; `exact`: none, ever.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the trade as a plot.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the finalists on this machine's card.")] = False,
    as_json: Json = False,
    nproc: Processes = None,
) -> int:
    """Find the fastest settings that fit the card, with the same global batch. Exit 3: nothing fits."""
    from framework.checks import placing
    from framework.memory.search.tradeoffs import INEXACT
    from framework.run.planning.fit import fit as search
    from framework.run.planning.fit import measured_best
    from framework.run.planning.plan_pool import prepared

    with prepared():
        composition = checked(recipe, overrides or (), nproc)
        _check(output, html, allow)
        inexact = INEXACT if allow == "inexact" else tuple(set_free or ())
        pins = _pins(composition, pin or ()) + (list(INEXACT) if allow == "exact" else [])
        judge = measured_best(say) if measure else None
        with placing(composition.origins):
            found = search(composition.config, pins=pins, inexact=inexact, judge=judge, runs_here=measure or None)
    missed = _written(recipe, overrides or (), found, output) if found.fits else []
    is_written = found.fits and not missed
    missed += written(html, "--html", lambda: _page(composition.recipe, found))
    if as_json:
        print_json({**found.to_json(), **as_document(missed)})
    else:
        _print(composition, found, output if is_written or not found.fits else None)
    return exit_code(missed, 0 if found.fits else DOES_NOT_FIT)


def _written(recipe: str, overrides: Sequence[str], found: "Found", output: Path | None) -> list[Problem]:
    from framework.compose.amending import amended

    return written(output, "--output", lambda: amended(recipe, overrides, found.config, found.overrides))


def _page(title: str, found: "Found") -> str:
    from framework.reports.frontier import fit_page

    return fit_page(title, found)


def _check(output: Path | None, html: Path | None, allow: str | None) -> None:
    if allow not in (None, "exact", "inexact"):
        raise RequestError([Problem("--allow", f"cannot be {allow!r}", None, "inexact or exact")])
    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise RequestError([Problem("--output", f"{output} is no YAML file", expected="a name that ends in .yaml")])
    check_writable(output, "--output")
    check_writable(html, "--html")


def _pins(composition: "Composition", words: list[str] | tuple[str, ...]) -> list[str]:
    """The pinned keys. `written` stands for those of the recipe's body and the command line."""
    from framework.schema.keys import every_key, left_open

    pins = [word for word in words if word != "written"]
    if "written" in words:
        open_keys = left_open(composition.config)
        by_hand = (key for key, origin in composition.origins.items() if origin.kind in ("recipe", "command line"))
        pins += [key for key in by_hand if key in every_key() and key not in open_keys]
    return pins


def _print(composition: "Composition", found: "Found", output: Path | None) -> None:
    from framework.reports.fit import fit_lines
    from framework.reports.terminal import strokes_for

    console = stdout()
    for line in fit_lines(composition.recipe, found, console.width, strokes_for(console.encoding)):
        console.print(line)
    if output is not None:
        console.print(f"\nwrote {output}" if found.fits else f"\n{output} was not written: nothing fits")

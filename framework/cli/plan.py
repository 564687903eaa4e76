"""Planning commands: `plan`, `fit` and `diff`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from framework.activity import doing, shown
from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.printing import (
    as_document,
    check_writable,
    complain,
    exit_code,
    one_line,
    print_columns,
    print_json,
    print_text,
    print_warnings,
    say,
    stdout,
    written,
)
from framework.errors import OutOfMemory, Problem, RequestError

if TYPE_CHECKING:
    from framework.compose import Composition
    from framework.compose.writing import Difference
    from framework.memory.ledger import Plan
    from framework.memory.search.found import Found
    from framework.run.planning.measurements import Measured
    from framework.run.planning.plan_pool import Rehearsals
    from framework.run.planning.what_if import Comparison

DOES_NOT_FIT = 3
COMMAND_WIDTH = 72
"""Most columns of a proposed command before it is continued on the next line."""


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page that needs nothing else.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the real step on this machine's card, on random tokens.")
    ] = False,
    several: Annotated[
        bool, typer.Option("-m", "--multirun", help="`gpu=a,b` is a row for each card, not one machine with both.")
    ] = False,
    as_json: Json = False,
    nproc: Processes = None,
) -> int:
    """Say what the run will cost on its card, phase by phase, without weights, data or a GPU. Exit 3: does not fit.

    A list of values for one key, such as model.model_max_length=2048,4096, gives one table.
    """
    from framework.compose.overrides import listed
    from framework.reports.page import plan_page
    from framework.run.planning.plan_pool import Rehearsals, prepared

    if (found := listed(overrides or (), several)) is not None:
        if measure:
            raise RequestError([Problem("--measure", "measures one request", expected=f"one value of {found[0]}")])
        return _compare(recipe, *found, html, as_json, nproc)
    with prepared():
        composition = checked(recipe, overrides or (), nproc)
        check_writable(html, "--html")
        composition, searched = decided(composition, runs_here=measure)
        measured, failure = _measured(composition) if measure else (None, None)
        with Rehearsals() as rehearsals:
            made = searched or planned(composition, rehearsals)
    missed = written(html, "--html", lambda: plan_page(composition.recipe, made, measured))
    if as_json:
        kept_from = [*missed, *([Problem("--measure", str(failure))] if failure is not None else [])]
        print_json({**_document(made, measured, composition.warnings), **as_document(kept_from)})
    else:
        _print(composition.recipe, made, measured)
        if not made.fits:
            print_text(f"\nsettings that fit:\n  {_fit_command(recipe, overrides or (), nproc, composition)}")
    code = exit_code(missed, 0 if made.fits else DOES_NOT_FIT)
    if failure is not None:
        complain(str(failure), with_traceback=False)
        return failure.exit_code
    return code


def _fit_command(recipe: str, overrides: Sequence[str], nproc: int | None, composition: "Composition") -> str:
    """The `fit` command for the same request, with the card if none was named. Long lines are continued with a
    backslash."""
    words = ["tunesmith", "fit", recipe, *overrides]
    if not any(word.startswith(("gpu=", "gpu.name=")) for word in overrides):
        words.append(f"gpu={composition.config.gpu.name}")
    words += ["--nproc", str(nproc)] if nproc is not None else []
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) > COMMAND_WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n    ".join(lines)


def _compare(
    recipe: str, key: str, words: Mapping[str, Sequence[str]], html: Path | None, as_json: bool, nproc: int | None
) -> int:
    """Plan each value of a key and print a row for it. Returns 3 if none of them fits."""
    from framework.reports.comparison import what_if_lines, what_if_page
    from framework.run.planning.what_if import what_if

    check_writable(html, "--html")
    requests = {value: decided(checked(recipe, typed, nproc))[0] for value, typed in words.items()}
    rows = what_if({value: request.config for value, request in requests.items()})
    title = next(iter(requests.values())).recipe
    missed = written(html, "--html", lambda: what_if_page(title, key, rows))
    if as_json:
        print_json({"key": key, "rows": [row.to_json() for row in rows], **as_document(missed)})
    else:
        console = stdout()
        for line in what_if_lines(title, key, rows, console.width):
            console.print(line)
    return exit_code(missed, 0 if any(row.fits for row in rows) else DOES_NOT_FIT)


def checked(recipe: str, overrides: Sequence[str], nproc: int | None = None) -> "Composition":
    """Compose and check a request. Raises RequestError with everything wrong in its text."""
    from framework.checks import PLAN, check_request

    report = check_request(recipe, overrides, nproc, PLAN)
    print_warnings(report.warnings)
    if report.composition is None:
        raise RequestError(report.problems)
    return report.composition


def decided(composition: "Composition", runs_here: bool = False) -> "tuple[Composition, Plan | None]":
    """Replace every `auto` of the request, reporting the reasons on stderr. Also returns the plan if the search made
    one."""
    from framework.checks import placing
    from framework.run.planning.fit import decide

    with placing(composition.origins):
        made = decide(composition.config, runs_here)
    for line in made.reasons:
        say(f"auto {line}")
    return replace(composition, config=made.config), made.found.plan if made.found is not None else None


def planned(composition: "Composition", rehearsals: "Rehearsals") -> "Plan":
    """The plan of a request.

    Raises RequestError whose problems have the place where their key was written.
    """
    from framework.checks import placing
    from framework.run.planning.plan_pool import plan_with_warnings

    composition, plan = decided(composition)
    if plan is not None:
        return plan
    with placing(composition.origins):
        return plan_with_warnings(composition.config, rehearsals)


def _measured(composition: "Composition") -> "tuple[Measured | None, OutOfMemory | None]":
    """The measurement on the card, or the out-of-memory error, which is reported after the plan."""
    from framework.run.planning.measurements import measure_in_subprocess

    try:
        with doing("measuring on this machine's card"):
            return measure_in_subprocess(composition.config), None
    except OutOfMemory as error:
        return None, error


def _document(made: "Plan", measured: "Measured | None", warnings: Sequence[str]) -> dict[str, object]:
    """The plan's document, with warnings of the request's check before its own."""
    from framework.reports.plan_text import measured_document

    added = {} if measured is None else {"measured": measured_document(measured)}
    return {**made.to_json(), "warnings": [*map(one_line, warnings), *made.warnings], **added}


def _print(title: str, made: "Plan", measured: "Measured | None") -> None:
    from framework.reports.terminal import plan_lines, strokes_for

    console = stdout()
    for line in plan_lines(title, made, measured, console.width, strokes_for(console.encoding)):
        console.print(line)


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
    from framework.compose.writing import amended
    from framework.memory.search.free_keys import INEXACT
    from framework.reports.fit import fit_page
    from framework.run.planning.fit import fit as search
    from framework.run.planning.fit import measured_best
    from framework.run.planning.plan_pool import prepared

    with prepared():
        composition = checked(recipe, overrides or (), nproc)
        _check_options(output, html, allow)
        inexact = INEXACT if allow == "inexact" else tuple(set_free or ())
        pins = _pinned_keys(composition, pin or ()) + (list(INEXACT) if allow == "exact" else [])
        judge = measured_best(say) if measure else None
        with placing(composition.origins):
            found = search(composition.config, pins=pins, inexact=inexact, judge=judge, runs_here=measure or None)
    missed = list[Problem]()
    if found.fits:
        missed += written(output, "--output", lambda: amended(recipe, overrides or (), found.config, found.overrides))
    is_written = found.fits and not missed
    missed += written(html, "--html", lambda: fit_page(composition.recipe, found))
    if as_json:
        print_json({**found.to_json(), **as_document(missed)})
    else:
        _print_found(composition, found, output if is_written or not found.fits else None)
    return exit_code(missed, 0 if found.fits else DOES_NOT_FIT)


def _check_options(output: Path | None, html: Path | None, allow: str | None) -> None:
    if allow not in (None, "exact", "inexact"):
        raise RequestError([Problem("--allow", f"cannot be {allow!r}", None, "inexact or exact")])
    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise RequestError([Problem("--output", f"{output} is not a YAML file", expected="a name that ends in .yaml")])
    check_writable(output, "--output")
    check_writable(html, "--html")


def _pinned_keys(composition: "Composition", typed: list[str] | tuple[str, ...]) -> list[str]:
    """The pinned keys. `written` means those in the recipe's body and on the command line."""
    from framework.schema.keys import every_key, left_open

    pins = [word for word in typed if word != "written"]
    if "written" in typed:
        open_keys = left_open(composition.config)
        by_hand = (key for key, origin in composition.origins.items() if origin.kind in ("recipe", "command line"))
        pins += [key for key in by_hand if key in every_key() and key not in open_keys]
    return pins


def _print_found(composition: "Composition", found: "Found", output: Path | None) -> None:
    from framework.reports.fit import fit_lines
    from framework.reports.terminal import strokes_for

    console = stdout()
    for line in fit_lines(composition.recipe, found, console.width, strokes_for(console.encoding)):
        console.print(line)
    if output is not None:
        console.print(f"\nwrote {output}" if found.fits else f"\n{output} was not written: nothing fits")


def diff(
    recipe: Recipe,
    other: Recipe,
    overrides: Overrides = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Plan both, and say what each difference costs in device memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the keys in which two recipes differ, with both values and where each came from. Overrides go to both."""
    from framework.compose import compose
    from framework.compose.writing import differences

    take = checked if memory else compose
    a, b = (take(name, overrides or ()) for name in (recipe, other))
    found = differences(a, b)
    compared = _plan_both(a, b, found) if memory else None
    document: dict[str, object] = {"differences": [difference.to_json() for difference in found]}
    if compared is not None:
        from framework.reports.comparison import comparison_document, comparison_lines

        document["memory"] = comparison_document(compared)
    if as_json:
        print_json(document)
        return
    _print_differences(found)
    if compared is not None:
        console = stdout()
        for line in comparison_lines(compared, console.width):
            console.print(line)


def _plan_both(a: "Composition", b: "Composition", found: "list[Difference]") -> "Comparison":
    from framework.run.planning.plan_pool import Rehearsals
    from framework.run.planning.what_if import find_causes

    keys = [difference.key for difference in found]
    with shown("planning both"), Rehearsals() as rehearsals:
        plans = planned(a, rehearsals), planned(b, rehearsals)
        return find_causes(a.config, b.config, plans, keys, rehearsals.tried)


def _print_differences(found: "list[Difference]") -> None:
    rows = [
        row
        for difference in found
        for row in (
            (difference.key, "a", _typed(difference.a), str(difference.origin_a)),
            ("", "b", _typed(difference.b), str(difference.origin_b)),
        )
    ]
    print_columns(rows)
    if not rows:
        print_text("no key differs")


def _typed(value: object) -> str:
    """A value as YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

"""The verbs that make something happen."""

from typing import Annotated

import typer

from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.printing import print_warnings
from framework.errors import Problem, RequestError


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before the first step.")] = False,
    multirun: Annotated[bool, typer.Option("-m", "--multirun", help="Sweep over lists of values.")] = False,
    as_json: Json = False,
    nproc: Processes = None,
) -> None:
    """Compose, check and train; everything is in the run folder afterwards."""
    from framework.checks import TRAIN, check_request

    if multirun:
        raise RequestError([Problem("-m", "not yet available: sweeps")])
    report = check_request(recipe, overrides or (), nproc, TRAIN)
    print_warnings(report.warnings)
    if report.composition is None:
        raise RequestError(report.problems)
    from framework.run.trainer import train as run

    run(report.composition, resume=resume, overwrite=overwrite, dry_run=dry_run)

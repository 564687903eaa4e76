"""`evaluate`: how good a trained model is."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import AllowBase, Json, Trust
from framework.cli.printing import print_json, print_text, say


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model or an adapter.")],
    file: Annotated[str | None, typer.Argument(help="Rows; else those that the run held out.")] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Tasks of lm-eval, with commas between.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows of each of these tasks; else all.")] = None,
    trust_remote_code: Trust = False,
    allow: AllowBase = None,
    as_json: Json = False,
) -> None:
    """Loss and metrics on the run's held-out rows or on a file, or the figures of lm-eval's tasks."""
    from framework.errors import Problem, RequestError
    from framework.run.checkpoints.trained_model import code_that_runs
    from framework.run.evaluate_saved import evaluate_saved, evaluate_tasks

    if tasks is not None and file is not None:
        raise RequestError([Problem("FILE", "tasks of lm-eval have rows of their own", expected="one of the two")])
    if tasks is None and limit is not None:
        raise RequestError([Problem("--limit", "is for --tasks", expected="leave it out")])
    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = evaluate_tasks(run, names, limit, trust_remote_code, allow or ())
        if as_json:
            print_json({"tasks": found})
            return
        for task, figures in found.items():
            for name, value in figures.items():
                print_text(f"{task}  {name}  {value:.4f}" if isinstance(value, float) else f"{task}  {name}  {value}")
        return
    made = evaluate_saved(run, file, trust_remote_code, allow or ())
    if as_json:
        print_json({"metrics": made.metrics, "rows": made.rows, made.unit.replace(" ", "_"): made.terms})
        return
    for name, value in made.metrics.items():
        print_text(f"{name:<20}{value:.4f}")
    print_text(f"{'over':<20}{made.rows:,} rows, {made.terms:,} {made.unit}")

"""The verbs that make something happen."""

from typing import TYPE_CHECKING, Annotated

import typer

from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.printing import print_json, print_warnings
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.run.trainer import RunResult


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A key that may differ from the run being resumed.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before the first step; write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results, and nothing while the run goes on.")] = False,
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

    config, name = report.composition.config, report.composition.recipe
    silent = quiet or as_json
    result = run(config, name, resume=resume, overwrite=overwrite, dry_run=dry_run, allow=allow or (), quiet=silent)
    if as_json:
        print_json(
            {"folder": str(result.folder), "steps": result.steps, "evals": result.evals, "sample": result.sample}
        )
    elif not dry_run:
        _report(result)


def _report(result: "RunResult") -> None:
    """Where the run is, what the model says, and what to try next."""
    print(f"run folder  {result.folder}")
    if result.sample:
        prompt, completion = result.sample
        print(f"prompt      {prompt!r}\ncompletion  {completion!r}")
    for values in result.evals[:1] + result.evals[1:][-1:]:
        print(f"eval loss   {values['eval_loss']:.4f} at step {values['step']}")
    for name, value in list(result.evals[-1].items())[2:8] if result.evals else ():
        print(f"{name.replace('_', ' '):<12}{value:.4f}")
    final = result.folder / "final"
    if (final / "adapter_config.json").exists():
        print(f"adapter     {final} (peft's PeftModel.from_pretrained loads it on its base)")
        print(f"plain model tunesmith merge {result.folder}")
    else:
        print(f"model       {final} ({result.loader}.from_pretrained loads it)")
    print(f"again       tunesmith train {result.folder / 'config.yaml'} training.learning_rate=1e-4")
    print(result.memory)

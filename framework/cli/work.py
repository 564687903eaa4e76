"""`train`, as a single process, a rank or a sweep."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framework.activity import now
from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.printing import print_json, print_prose, print_text, print_warnings, say
from framework.errors import Problem, RequestError
from framework.installation import require_versions
from framework.run.ranks.environment import launched
from framework.run.ranks.signals import BEFORE_ALL, announced_interrupt
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.compose import Composition
    from framework.run.hooks import RunResult
    from framework.run.ranks.environment import Launched


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
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="One run for each combination of `key=a,b`, by Hydra.")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With -m: begin no further run once one has failed.")
    ] = False,
    as_json: Json = False,
    nproc: Processes = None,
) -> int:
    """Compose, check and train; everything is in the run folder afterwards."""
    require_versions()
    options = Options(resume, tuple(allow or ()), overwrite, dry_run, quiet, as_json)
    if multirun:
        return _swept(recipe, overrides or (), nproc, options, fail_fast)
    if fail_fast:
        raise RequestError([Problem("--fail-fast", "is about the runs of a sweep", expected="-m next to it")])
    from framework.checks import placing
    from framework.run.planning import plan_cache
    from framework.run.planning.plan_pool import dismiss, prepared

    with announced_interrupt(lambda: BEFORE_ALL):
        if (found := launched()) is not None and found.world > 1:
            _train_as_rank(found, recipe, overrides or (), nproc, options)
            return 0
        with prepared():
            composition = _in_its_folder(_checked(recipe, overrides or (), nproc), recipe, options)
            if plan_cache.read(composition.config) is not None:
                dismiss()
            with placing(composition.origins):
                if composition.config.gpu.count > 1:
                    from framework.run.launch.launch import launch

                    return launch(composition.config, composition.recipe, options.arguments)
                now("loading torch and transformers", is_long=True)
                from framework.run.trainer import train as run

                now("preparing the run")
                _show(run(composition.config, composition.recipe, **options.keywords), options)
    return 0


@dataclass(frozen=True)
class Options:
    """The options of `train`, as keywords and as command-line arguments for another process."""

    resume: bool
    allow: tuple[str, ...]
    overwrite: bool
    dry_run: bool
    quiet: bool
    as_json: bool

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of `framework.run.trainer.train`."""
        quiet = self.quiet or self.as_json
        keys = {"resume": self.resume, "overwrite": self.overwrite, "dry_run": self.dry_run, "quiet": quiet}
        return {**keys, "allow": self.allow}

    @property
    def arguments(self) -> list[str]:
        flags = {"resume": self.resume, "overwrite": self.overwrite, "dry-run": self.dry_run, "quiet": self.quiet}
        arguments = [f"--{name}" for name, is_set in {**flags, "json": self.as_json}.items() if is_set]
        return arguments + [argument for key in self.allow for argument in ("--allow", key)]


def _swept(recipe: str, overrides: Sequence[str], nproc: int | None, options: Options, fail_fast: bool) -> int:
    from framework.cli.sweep import sweep
    from framework.compose.sweep import sweep_of
    from framework.run.launch.sweep import SweptRun
    from framework.run.record.run_folder import BOTH

    if options.resume and options.overwrite:
        raise RequestError([BOTH])
    if (found := launched()) is not None and found.world > 1:
        message = (
            f"{found.by} has started {counted(found.world, 'process', 'processes')}, and a sweep is started by one"
        )
        raise RequestError([Problem("-m", message, expected="one process, and --nproc or a launcher of Hydra's")])
    arguments = replace(options, resume=False, as_json=False).arguments
    run = SweptRun(recipe, sweep_of(overrides), tuple(arguments), nproc, options.resume, fail_fast, options.quiet)
    return sweep(run, options.overwrite, options.dry_run, options.as_json)


def _checked(recipe: str, overrides: Sequence[str], nproc: int | None) -> "Composition":
    from framework.checks import TRAIN, check_request

    report = check_request(recipe, overrides, nproc, TRAIN)
    print_warnings(report.warnings)
    if report.composition is None:
        raise RequestError(report.problems)
    return report.composition


def _in_its_folder(composition: "Composition", recipe: str, options: Options) -> "Composition":
    """For `--resume` or `--overwrite` with the config in a run folder, use that folder as the run's, since it may have
    been copied or moved from the one that the config names."""
    from framework.run.record.run_folder import is_run_folder

    folder, training = Path(os.path.abspath(recipe)).parent, composition.config.training
    origin = composition.origins.get("training.output_dir")
    is_typed = origin is not None and origin.kind == "command line"
    is_config = Path(recipe).name == "config.yaml" and is_run_folder(folder)
    named = Path(training.output_dir) if training.output_dir is not None else None
    if not (options.resume or options.overwrite) or is_typed or not is_config:
        return composition
    if named is not None and os.path.realpath(named) == os.path.realpath(folder):
        return composition
    if named is not None:
        say(f"using the run in {folder}, the folder of this config; the config itself names {named}")
    config = composition.config.model_copy(update={"training": training.model_copy(update={"output_dir": str(folder)})})
    return replace(composition, config=config)


def _train_as_rank(
    found: "Launched", recipe: str, overrides: Sequence[str], nproc: int | None, options: Options
) -> None:
    """Train as one of several ranks. The main one composes, so that problems are reported once."""
    now("loading torch and transformers", is_long=True)
    from framework.run.ranks.coordinator import process_group
    from framework.run.trainer import train as run
    from framework.schema.config import TrainingConfig

    now("preparing the run")

    def compose() -> str:
        if nproc not in (None, found.world):
            started = f"{found.by} has started {counted(found.world, 'process', 'processes')}"
            message = f"--nproc {nproc} is asked for, and {started}"
            raise RequestError([Problem("--nproc", message, expected=f"--nproc {found.world}, or none")])
        composition = _in_its_folder(_checked(recipe, overrides, found.world), recipe, options)
        return json.dumps({"config": composition.config.model_dump(mode="json"), "name": composition.recipe})

    with process_group() as coordinator, announced_interrupt(lambda: BEFORE_ALL):
        request = json.loads(coordinator.shared("request", compose))
        result = run(TrainingConfig.model_validate(request["config"]), request["name"], **options.keywords)
        if coordinator.ranks.is_main:
            _show(result, options)


def _show(result: "RunResult", options: Options) -> None:
    if options.as_json:
        print_json(
            {"folder": str(result.folder), "steps": result.steps, "evals": result.evals, "sample": result.sample}
        )
    elif not options.dry_run:
        _report(result)


def _report(result: "RunResult") -> None:
    """Print the run folder, a sample, results and next commands."""
    print_text(f"run folder  {result.folder}")
    if result.sample:
        prompt, completion = result.sample
        print_text(f"prompt      {prompt!r}\ncompletion  {completion!r}")
    for values in result.evals[:1] + result.evals[1:][-1:]:
        print_text(f"eval loss   {values['eval_loss']:.4f} at step {values['step']}")
    for name, value in list(result.evals[-1].items())[2:8] if result.evals else ():
        print_text(f"{name.replace('_', ' '):<11} {value:.4f}")
    final = result.folder / "final"
    if (final / "adapter_config.json").exists():
        print_text(f"adapter     {final} (peft's PeftModel.from_pretrained loads it on its base)")
        if result.is_mergeable:
            print_text(f"plain model tunesmith merge {result.folder}")
    else:
        print_text(f"model       {final} ({result.loader}.from_pretrained loads it)")
    print_text(f"again       tunesmith train {result.folder / 'config.yaml'} training.learning_rate=1e-4")
    print_prose(result.memory)

"""`train -m`: check every run before the first starts, launch them, and print one table of results."""

import contextlib
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from framework.activity import now
from framework.cli.printing import complain, print_columns, print_json, print_text, print_warnings, say
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.compose import Composition
    from framework.compose.sweep import Job, Outline
    from framework.run.launch.sweep import Result, SweptRun

ELSEWHERE = ("submitit_slurm", "ray")
"""Launchers that run on other machines."""


def sweep(run: "SweptRun", overwrite: bool, dry_run: bool, as_json: bool) -> int:
    """Run a sweep and return the worst exit code (in the order 130, 1, 4, 3, 2, 0). A failed run does not stop others.

    Raises RequestError with the problems of all runs before the first starts.
    """
    from framework.run.launch.sweep import INTERRUPTED, forget_results, is_stopped, reason_of, results_of, worst
    from framework.run.record.lock import only_run
    from framework.run.record.run_folder import RunFolder, make

    outline = _checked(run, overwrite)
    for job in outline.jobs or ():
        say(f"run {job.number}: tunesmith train {shlex.join(run.arguments(job))}")
    with contextlib.ExitStack() as stack:
        folder = outline.folder
        if dry_run:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tunesmith-", dir="."))).absolute()
        make(RunFolder(folder))
        stack.enter_context(only_run(folder))
        forget_results(folder)
        now("")  # each run shows its own activity
        failures = _launch(run, folder)
        results = _completed(outline, results_of(folder))
        failed = [Problem("", f"run {one.number}: {reason_of(folder, one)}") for one in results if one.exit_code]
        codes = [INTERRUPTED] if is_stopped(folder) else [*failures, *(result.exit_code for result in results)]
    code = worst(codes)
    if as_json:
        added = {"errors": [problem.to_json() for problem in failed]} if failed else {}
        print_json({"folder": str(outline.folder), "exit_code": code, "runs": [*map(asdict, results)], **added})
    else:
        head = ("run", "exit", "steps", "loss", "eval loss", "peak GiB", "seconds", "folder", "overrides")
        print_columns([head, *(_row(result, outline.folder) for result in results)])
        print_text(f"sweep folder  {outline.folder} (results/ has what each run has printed)")
    return code


def _checked(run: "SweptRun", overwrite: bool) -> "Outline":
    """Check all runs. Problems and warnings are reported once, naming their runs unless all have them."""
    from framework.checks import TRAIN, check_request
    from framework.compose import draft

    shared = draft(
        run.recipe, [override for override in run.sweep.overrides if override not in run.sweep.swept], run.nproc
    )
    # Folder of the sweep unless Hydra's settings give one.
    from framework.run.record.run_folder import default_path

    typed = [override for override in run.sweep.overrides if override.startswith("training.output_dir=")]
    if typed and run.sweep.names_folder():
        message = "hydra.sweep.dir= names the folder of the sweep as well"
        raise RequestError([Problem(typed[0], message, "command line", "one of the two")])
    folder = shared.config.training.output_dir or str(default_path(shared.recipe, run.resume, overwrite))
    outline = run.sweep.outline(folder)
    if outline.jobs is None:
        if shared.problems:
            raise RequestError(shared.problems)
        return outline
    needs = replace(TRAIN, devices="any") if run.sweep.chosen("launcher") in ELSEWHERE else TRAIN
    problems: list[tuple[Job, Problem]] = []
    warnings: list[tuple[Job, Problem]] = []
    going = [path for job in outline.jobs for path in _held(job)] if overwrite else []
    for job in outline.jobs:
        report = check_request(run.recipe, run.overrides(job), run.nproc, needs)
        taken = _lost(report.composition, job, going) if overwrite else _taken(run, job)
        problems += [(job, problem) for problem in (*report.problems, *taken)]
        warnings += [(job, warning) for warning in report.warnings]
    print_warnings(_merged(warnings, len(outline.jobs)))
    if problems:
        raise RequestError(_merged(problems, len(outline.jobs)))
    return outline


def _held(job: "Job") -> Sequence[Path]:
    """Files of an earlier run in this run's folder. An impossible path is reported by the run itself."""
    from framework.run.record.run_folder import held

    with contextlib.suppress(OSError, ValueError):
        return held(job.folder)
    return ()


def _lost(composition: "Composition | None", job: "Job", going: Sequence[Path]) -> Sequence[Problem]:
    """Problems of removing the files of all runs for `--overwrite`: one run may read what another removes."""
    from framework.run.record.overwrite import overwrite_problems

    return overwrite_problems(composition.config, job.folder, going) if composition is not None else ()


def _taken(run: "SweptRun", job: "Job") -> Sequence[Problem]:
    """Problems of a run's folder."""
    from framework.run.launch.sweep import has_checkpoint

    found = _held(job)
    if not found or (run.resume and has_checkpoint(job.folder)):
        return ()
    message = f"{job.folder} already holds a run ({', '.join(path.name for path in found)})"
    expected = "--overwrite or another folder" if run.resume else "--resume, --overwrite or another folder"
    return (Problem("training.output_dir", message, expected=expected),)


def _merged(found: "Sequence[tuple[Job, Problem]]", total: int) -> list[Problem]:
    """Each problem once, naming its runs unless all have it."""
    runs: dict[Problem, list[Job]] = {}
    for job, problem in found:
        runs.setdefault(problem, []).append(job)
    reported = []
    for problem, jobs in runs.items():
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        which = f" (run {jobs[0].number}: {' '.join(jobs[0].overrides)}{more})" if len(jobs) < total else ""
        reported.append(replace(problem, message=problem.message + which))
    return reported


def _launch(run: "SweptRun", folder: Path) -> Sequence[int]:
    """Run the jobs with Hydra's launcher. If that fails, report it and return its exit code; results are kept."""
    from framework.run.launch.sweep import KILLED

    with _graceful_interrupt(folder):
        try:
            run.sweep.launch(folder, run)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}".partition("\n")[0]
            complain(f"the launcher {run.sweep.chosen('launcher')} failed: {detail}", with_traceback=False)
            return [KILLED]
    return []


@contextlib.contextmanager
def _graceful_interrupt(folder: Path) -> Iterator[None]:
    """Handle Ctrl-C: the first one starts no further run, and runs on this machine receive it too, save and end. The
    second one leaves the runs to themselves, which matters on other machines."""
    from framework.run.launch.sweep import stop

    earlier = signal.getsignal(signal.SIGINT)

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(number, earlier)
        stop(folder)
        say("interrupted: no further run starts, waiting for those in progress; Ctrl-C again leaves them")

    signal.signal(signal.SIGINT, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _completed(outline: "Outline", results: "list[Result]") -> "list[Result]":
    """Add results for runs that their launcher has lost, and the folder of dry runs."""
    from framework.run.launch.sweep import KILLED, Result

    if outline.jobs is None:
        return results
    known = {result.number: result for result in results}
    made = [known.get(job.number, Result(job.number, job.overrides, "", KILLED)) for job in outline.jobs]
    return [replace(result, folder=str(job.folder)) for result, job in zip(made, outline.jobs, strict=True)]


def _row(result: "Result", sweep: Path) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    peak = result.peak_allocated_bytes
    return (
        str(result.number),
        "not begun" if result.exit_code is None else str(result.exit_code),
        shown(result.steps, ""),
        shown(result.loss, ".4f"),
        shown(result.eval_loss, ".4f"),
        shown(None if peak is None else peak / 2**30, ".2f"),
        format(result.seconds, ".0f"),
        os.path.relpath(result.folder, sweep),
        " ".join(result.overrides),
    )

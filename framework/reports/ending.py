"""How a run ended, as far as its folder tells. No torch."""

from dataclasses import dataclass
from enum import StrEnum

from framework.errors import RequestError
from framework.memory.explain import Explanation, explain_evidence
from framework.memory.explain.causes import Circumstances
from framework.memory.explain.evidence import (
    REPORT,
    STOPPED,
    Evidence,
    gather,
    read_circumstances,
    read_text,
)
from framework.memory.explain.saved_plan import read_plan
from framework.memory.explain.shapes import Kind
from framework.memory.ledger import STEP_PHASES
from framework.reports.run_files import Run
from framework.schema.intervals import steps_between

EPOCH_DIGITS = 4
"""To which `metrics.jsonl` rounds `epoch`."""


class How(StrEnum):
    """The ways in which a run ends."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    STOPPED = "stopped by itself"
    INTERRUPTED = "interrupted"
    UNFINISHED = "not finished"


@dataclass(frozen=True)
class Ending:
    """How it ended, in a few words and in sentences; `explanation` of what ended it, where it was a failure."""

    how: How
    headline: str
    details: tuple[str, ...]
    explanation: Explanation | None = None


def read_ending(run: Run) -> Ending:
    """A failure that nothing came after, else the export behind the last step, else what was left behind."""
    explanation = _failure(run)
    if explanation is not None:
        kind, step = explanation.message.kind, explanation.circumstances.step
        how = How.OUT_OF_MEMORY if kind is Kind.OUT_OF_MEMORY else How.STOPPED
        at = f" in step {step}" if step is not None else ""
        return Ending(how, f"{how}{at}, {_steps(run)}", _what_is_left(run), explanation)
    made = _steps(run)
    if _is_done(run):
        return Ending(How.DONE, f"done, {made}", ("The trained model is in final/ of the run folder.", *_passes(run)))
    if _was_saved_on_request(run):
        why = "It was saved there out of turn, as it is after Ctrl-C or SIGTERM, or where rows could not be read."
        return Ending(How.INTERRUPTED, f"interrupted, {made}", (why, *_what_is_left(run)))
    if _has_made_all(run):
        why = "All steps are made, but the folder has no export of the last: `--resume` writes it."
        return Ending(How.UNFINISHED, f"not finished, {made}", (why, *_what_is_left(run)))
    why = "Nothing in the folder tells why: it is still running, was killed, or ended in an error that it only printed."
    return Ending(How.UNFINISHED, f"not finished, {made}", (why, *_what_is_left(run)))


def _failure(run: Run) -> Explanation | None:
    """The failure that ended the run: of its own newest report, else of a log in its folder."""
    reports = [file for name in (REPORT, STOPPED) if (file := run.folder / name).exists()]
    try:
        if reports:
            newest = max(reports, key=lambda file: file.stat().st_mtime)
            text = read_text(newest)
            circumstances = read_circumstances(text)
            if _was_repaired(run, circumstances):
                return None
            return explain_evidence(Evidence(text, circumstances, read_plan(run.folder)[0]))
        return None if _is_done(run) else explain_evidence(gather(run.folder))
    except RequestError:
        return None


def _was_repaired(run: Run, known: Circumstances) -> bool:
    """Whether the run went on with a smaller size. The last repair may be of the step that later ended it."""
    step, last = known.step or 0, run.metrics.last_step
    if not known.repairs or known.repairs[-1].step != step:
        return False
    return last > step or (last == step > 0 and known.phase in STEP_PHASES) or _is_done(run)


def _is_done(run: Run) -> bool:
    """Whether the export is of the last step: `memory.json` is written right before it."""
    wrote = run.memory.last_step if run.memory is not None else None
    return run.is_exported and (wrote is None or wrote >= run.metrics.last_step)


def _was_saved_on_request(run: Run) -> bool:
    last = run.metrics.last_step
    if run.config is None or not last or run.checkpoints[-1:] != (last,) or _has_made_all(run):
        return False
    training = run.config.training
    if training.best_metric is not None and last in run.metrics.evals:
        return False
    if training.save_steps == "epoch":
        return bool((run.metrics.steps[last].get("epoch") or 0.5) % 1)
    every = steps_between(training.save_steps, training.max_steps or last)
    return not every or last % every != 0


def _has_made_all(run: Run) -> bool:
    """Whether no step is left, so that only the evaluation or the export at the end is missing."""
    if run.config is None or not run.metrics.last_step:
        return False
    training, last = run.config.training, run.metrics.last_step
    if training.max_steps is not None:
        return last == training.max_steps  # a run that was resumed for longer has made more
    epochs, asked = run.metrics.steps[last].get("epoch"), training.num_train_epochs
    return epochs is not None and epochs - epochs / last < asked <= epochs + 10.0**-EPOCH_DIGITS


def _steps(run: Run) -> str:
    """The steps that were made, of how many where that is known."""
    last = run.metrics.last_step
    if not last:
        return "no step made"
    total = run.config.training.max_steps if run.config is not None else None
    of = f" of {total:,}" if total is not None and total >= last else ""
    return f"{last:,}{of} {'step' if last == 1 and not of else 'steps'} made"


def _passes(run: Run) -> tuple[str, ...]:
    epoch = run.metrics.steps[run.metrics.last_step].get("epoch") if run.metrics.steps else None
    return () if epoch is None else (f"{epoch:g} {'pass' if epoch == 1 else 'passes'} over the training rows.",)


def _what_is_left(run: Run) -> tuple[str, ...]:
    if not run.checkpoints:
        return ("There is no checkpoint to go on from.",)
    return (f"The newest checkpoint is of step {run.checkpoints[-1]:,}: `--resume` goes on from there.",)

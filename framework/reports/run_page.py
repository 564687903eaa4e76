"""A run as one self-contained HTML page: how it ended, planned and measured memory, and curves."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from framework.errors import RequestError
from framework.escaping import escape
from framework.memory.explain import Explanation, explain_evidence
from framework.memory.explain.causes import Circumstances
from framework.memory.explain.evidence import (
    REPORT,
    STOPPED,
    Evidence,
    earlier_reports,
    gather,
    read_circumstances,
    read_plan,
    read_text,
)
from framework.memory.explain.shapes import Kind
from framework.memory.explain.text import MOST_MOVES, cause_lines
from framework.memory.ledger import STEP_PHASES
from framework.reports import plan_text
from framework.reports.page import definitions, document, items
from framework.reports.run_curves import curve_parts, evaluation_parts, memory_parts, sample_parts
from framework.reports.run_files import Environment, Run
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import steps_between
from framework.schema.plural import counted

EPOCH_DIGITS = 4
"""Rounding error of `epoch` in `metrics.jsonl`."""


class How(StrEnum):
    """Ways in which a run ends."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    STOPPED = "stopped by itself"
    INTERRUPTED = "interrupted"
    UNFINISHED = "not finished"


@dataclass(frozen=True)
class Ending:
    """How a run ended, as a headline and sentences; `explanation` if it was a failure."""

    how: How
    headline: str
    details: tuple[str, ...]
    explanation: Explanation | None = None


def read_ending(run: Run) -> Ending:
    """The ending of a run: a failure after which it did not continue, else its export, else an unfinished state."""
    explanation = _failed(run)
    if explanation is not None:
        kind, step = explanation.message.kind, explanation.circumstances.step
        how = How.OUT_OF_MEMORY if kind is Kind.OUT_OF_MEMORY else How.STOPPED
        at = f" in step {step}" if step is not None else ""
        return Ending(how, f"{how}{at}, {_steps(run)}", _what_is_left(run), explanation)
    made = _steps(run)
    if _is_done(run):
        epoch = run.metrics.steps[run.metrics.last_step].get("epoch") if run.metrics.steps else None
        passes = () if epoch is None else (f"{epoch:g} {'pass' if epoch == 1 else 'passes'} over the training rows.",)
        return Ending(How.DONE, f"done, {made}", ("The trained model is in final/ of the run folder.", *passes))
    if _was_saved_on_request(run):
        why = "It was saved outside of its schedule, as after Ctrl-C or SIGTERM, or when rows could not be read."
        return Ending(How.INTERRUPTED, f"interrupted, {made}", (why, *_what_is_left(run)))
    if _has_made_all(run):
        why = "All steps are complete, but the folder has no export of the last one: `--resume` writes it."
        return Ending(How.UNFINISHED, f"not finished, {made}", (why, *_what_is_left(run)))
    why = "The folder does not show why: it is still running, was killed, or ended in an error that it only printed."
    return Ending(How.UNFINISHED, f"not finished, {made}", (why, *_what_is_left(run)))


def _failed(run: Run) -> Explanation | None:
    """The failure that ended the run, from its newest report, else from a log in its folder."""
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
    """Whether the run continued with a smaller size. The last repair may be of the step that later ended it."""
    step, last = known.step or 0, run.metrics.last_step
    if not known.repairs or known.repairs[-1].step != step:
        return False
    return last > step or (last == step > 0 and known.phase in STEP_PHASES) or _is_done(run)


def _is_done(run: Run) -> bool:
    """Whether the export belongs to the last step: `memory.json` is written right before it."""
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
    """Whether all steps are complete, so that only the final evaluation or export is missing."""
    if run.config is None or not run.metrics.last_step:
        return False
    training, last = run.config.training, run.metrics.last_step
    if training.max_steps is not None:
        return last == training.max_steps  # a run that was resumed for longer has more
    epochs, asked = run.metrics.steps[last].get("epoch"), training.num_train_epochs
    return epochs is not None and epochs - epochs / last < asked <= epochs + 10.0**-EPOCH_DIGITS


def _steps(run: Run) -> str:
    """The number of completed steps, and of all if known."""
    last = run.metrics.last_step
    if not last:
        return "no step made"
    total = run.config.training.max_steps if run.config is not None else None
    of = f" of {total:,}" if total is not None and total >= last else ""
    return f"{last:,}{of} {'step' if last == 1 and not of else 'steps'} made"


def _what_is_left(run: Run) -> tuple[str, ...]:
    if not run.checkpoints:
        return ("There is no checkpoint to resume from.",)
    return (f"The newest checkpoint is of step {run.checkpoints[-1]:,}: `--resume` continues from there.",)


LONGEST = 200_000
"""Most characters of the config on the page. One with tens of thousands of class names is longer."""

STYLE = """
<style>
:root { --first: #3257c4; --second: #a16207 } .frame { overflow-x: auto }
@media (prefers-color-scheme: dark) { :root { --first: #8aa6ff; --second: #e5b84a } }
path.first { stroke: var(--first) } path.second { stroke: var(--second) } .faint { opacity: .35; stroke-width: 1 }
path.first, path.second { stroke-linecap: round; stroke-linejoin: round } .axis { stroke: var(--soft); stroke-width: 1 }
.grid { stroke: var(--rule); stroke-width: 1 } path.dashed { stroke-dasharray: 6 4 } .broken { stroke: var(--bad) }
.moment { stroke: var(--warn); stroke-dasharray: 2 3 } circle.first, rect.first { fill: var(--first) }
circle.second, rect.second { fill: var(--second) } circle.first, circle.second { stroke: var(--ground) }
.key { border-top: 3px solid; display: inline-block; margin-right: .4em; vertical-align: middle; width: 1.4em }
.key.first { border-color: var(--first) } .key.second { border-color: var(--second) }
.key.dashed { border-top-style: dashed }
.key.limit { border-color: var(--bad) } .key.moment { border-color: var(--warn); border-top-style: dotted }
.small { display: grid; gap: 0 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)) }
.small svg { min-width: 0 } .small > div { min-width: 0 }
h3 { font-size: .95rem; font-weight: 500; margin: 1rem 0 .25rem }
.warn { color: var(--warn) } tbody th { font-weight: 400 }
pre { background: color-mix(in srgb, var(--ink) 4%, transparent); border-radius: 4px; margin: .5rem 0;
  font: 13px/1.45 ui-monospace, monospace; max-height: 40rem; overflow: auto; padding: .6rem }
.wrapped { white-space: pre-wrap; overflow-wrap: anywhere } code { font: .9em ui-monospace, monospace }
h1, p { overflow-wrap: anywhere }
.narrow { display: none } .narrow svg { min-width: 0 }
@media (max-width: 480px) { .wide { display: none } .narrow { display: block } }
@media (max-width: 480px) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem } }
</style>
"""

TONES = {How.DONE: "fits", How.INTERRUPTED: "warn", How.UNFINISHED: "warn"}
"""Style class of the headline; failures use `over`."""


def run_page(run: Run) -> str:
    """Page with everything in the files of the run."""
    ending = read_ending(run)
    # Sizes that were reduced when memory ran out.
    found = run.memory.repairs if run.memory is not None else ()
    if not found and ending.explanation is not None:
        found = ending.explanation.circumstances.repairs
    repairs = [f"{repair}: step undone and retried; the global batch is unchanged" for repair in found]
    parts = [
        STYLE,
        f'<h1 class="{TONES.get(ending.how, "over")}">{escape(run.name)}: {escape(ending.headline)}</h1>',
        *(f'<p class="soft">{escape(detail)}</p>' for detail in ending.details),
        *_failure(ending),
        "<h2>What was trained</h2>",
        definitions(_facts(run)),
        *items("Repaired", repairs),
        *items(
            "Earlier stops, after which the run continued",
            [f"tunesmith explain {file}" for file in earlier_reports(run.folder)],
        ),
        *memory_parts(run),
        *curve_parts(run),
        *evaluation_parts(run),
        *sample_parts(run),
        *(items("Assumptions of the plan", run.plan.assumptions) if run.plan is not None else ()),
        *(items("Warnings of the plan", run.plan.warnings, "warnings") if run.plan is not None else ()),
        *items("Missing or incomplete files", run.lacks),
        *_config(run.config_text),
    ]
    return document(f"Run {run.name}", parts)


def _failure(ending: Ending) -> Iterator[str]:
    """Cause, arithmetic and proposed changes, as printed by `explain`."""
    explanation = ending.explanation
    if explanation is None:
        return
    yield "<h2>Why</h2>"
    yield f'<pre class="wrapped">{escape(chr(10).join(cause_lines(explanation)))}</pre>'
    if explanation.moves:
        yield "<h2>What to change</h2>"
        yield _moves(explanation)


def _moves(explanation: Explanation) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(move.override)}</code><p class="soft">{escape(move.costs)}</p></th>'
        f"<td>{plan_text.size(move.saves_bytes) if move.saves_bytes is not None else 'not known'}</td>"
        f"<td>{'same' if move.exact else 'CHANGED'}</td></tr>"
        for move in explanation.moves[:MOST_MOVES]
    )
    saves = f"saves in {plan_text.phase_name(explanation.phase) if explanation.phase else 'the peak of the step'}"
    heading = "".join(f'<th scope="col">{name}</th>' for name in ("Override", escape(saves), "training"))
    return (
        f'<div class="frame" tabindex="0"><table><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """Facts about model, data, settings and machine."""
    facts = _run_facts(run.environment) if run.environment is not None else []
    facts += _config_facts(run.config) if run.config is not None else []
    if run.plan is None:
        return [*facts, *_batch(run.config)]
    for name, sentence in plan_text.facts(run.plan):
        if name != "step":  # shown in a separate table
            facts.append((name if name in ("parameters", "batch") else f"planned {name}", sentence))
    return facts


def _run_facts(environment: Environment) -> list[tuple[str, str]]:
    program, *rest = environment.command or ("",)
    called = Path(program).name.replace("__main__.py", "tunesmith")
    installed = ", ".join(f"{name} {version}" for name, version in environment.packages.items() if version)
    recipe = [("recipe", name) for verb, name in pairwise(rest) if verb == "train"]
    return [
        *recipe[:1],
        ("command", shlex.join([called, *rest])),
        ("started", f"{environment.date}{' (resumed)' if '--resume' in rest else ''}"),
        ("git", environment.git or "not in a git repository"),
        ("versions", f"Python {environment.python}, {installed}; {environment.platform}"),
    ]


def _config_facts(config: TrainingConfig) -> list[tuple[str, str]]:
    training, model, card = config.training, config.model, config.gpu
    architecture = model.architecture.get("model_type") if model.architecture is not None else None
    name = model.model_name or "no name"
    method = f"{config.peft.peft_method}, rank {config.peft.lora_r}" if training.use_peft else "all that is not frozen"
    start = "" if model.load_pretrained_weights else ", from random weights"
    precision = f"weights {model.torch_dtype_str or 'auto'}, autocast {training.mixed_precision_dtype or 'auto'}"
    return [
        ("model", f"{name}{f' ({architecture})' if architecture else ''}{start}"),
        ("task", f"{training.task}; trains {method}"),
        ("data", ", ".join(source.path for source in config.data.train) or "none is written"),
        (
            "optimizer",
            f"{training.optimizer}, learning rate {training.learning_rate:g}, {training.lr_scheduler_type}; "
            f"{precision}",
        ),
        ("card", f"{card.name}{f' x {card.count}' if card.count > 1 else ''}"),
    ]


def _batch(config: TrainingConfig | None) -> list[tuple[str, str]]:
    """The batch equation, for a run without a plan."""
    try:
        return [("batch", str(config.batch))] if config is not None else []
    except ValueError:
        return []


def _config(text: str) -> Iterator[str]:
    if not text:
        return
    shown = (
        text
        if len(text) <= LONGEST
        else f"{text[:LONGEST]}\n(the first {LONGEST:,} of {counted(len(text), 'character')})"
    )
    yield "<details><summary>config.yaml, which trains this again</summary>"
    yield f'<pre tabindex="0">{escape(shown)}</pre></details>'

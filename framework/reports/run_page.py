"""A run as one HTML page that needs nothing else: how it ended, the plan next to what was measured, and its curves."""

import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from framework.escaping import escape
from framework.memory.explain import Explanation
from framework.memory.explain.evidence import earlier_reports
from framework.memory.explain.text import MOST_MOVES, cause_lines
from framework.reports import plan_text
from framework.reports.ending import Ending, How, read_ending
from framework.reports.page import definitions, document, items
from framework.reports.phase_pairs import memory_parts
from framework.reports.run_curves import curve_parts
from framework.reports.run_files import Environment, Run
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

LONGEST = 200_000
"""Characters of the config on the page. One with tens of thousands of class names is longer."""

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
details { margin: .5rem 0 } summary { color: var(--soft); cursor: pointer; font-size: .85rem }
.warn { color: var(--warn) } tbody th { font-weight: 400 }
pre { background: color-mix(in srgb, var(--ink) 4%, transparent); border-radius: 4px; margin: .5rem 0;
  font: 13px/1.45 ui-monospace, monospace; max-height: 40rem; overflow: auto; padding: .6rem }
.wrapped { white-space: pre-wrap; overflow-wrap: anywhere } code { font: .9em ui-monospace, monospace }
h1, p { overflow-wrap: anywhere }
@media (max-width: 480px) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem } }
</style>
"""

TONES = {How.DONE: "fits", How.INTERRUPTED: "warn", How.UNFINISHED: "warn"}
"""The class of the headline; failures have that of what does not fit."""


def run_page(run: Run) -> str:
    """Everything that the files of the run tell."""
    ending = read_ending(run)
    # Sizes that were halved when memory ran out.
    found = run.memory.repairs if run.memory is not None else ()
    if not found and ending.explanation is not None:
        found = ending.explanation.circumstances.repairs
    repairs = [f"{repair}: undone and made again; the global batch stayed as it was" for repair in found]
    parts = [
        STYLE,
        f'<h1 class="{TONES.get(ending.how, "over")}">{escape(run.name)}: {escape(ending.headline)}</h1>',
        *(f'<p class="soft">{escape(detail)}</p>' for detail in ending.details),
        *_failure(ending),
        "<h2>What was trained</h2>",
        definitions(_facts(run)),
        *items("Repaired", repairs),
        *items("Stopped, and gone on since", [f"tunesmith explain {file}" for file in earlier_reports(run.folder)]),
        *memory_parts(run),
        *curve_parts(run),
        *(items("Assumptions of the plan", run.plan.assumptions) if run.plan is not None else ()),
        *(items("Warnings of the plan", run.plan.warnings, "warnings") if run.plan is not None else ()),
        *items("Files that are not there or not whole", run.lacks),
        *_config(run.config_text),
    ]
    return document(f"Run {run.name}", parts)


def _failure(ending: Ending) -> Iterator[str]:
    """The cause, the arithmetic and the moves, as `explain` has them."""
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
    """What was trained, on what, with what."""
    facts = _run_facts(run.environment) if run.environment is not None else []
    facts += _config_facts(run.config) if run.config is not None else []
    if run.plan is None:
        return [*facts, *_batch(run.config)]
    for name, sentence in plan_text.facts(run.plan):
        if name != "step":  # which has a table of its own
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
            f"{training.optimizer}, rate {training.learning_rate:g}, {training.lr_scheduler_type}; {precision}",
        ),
        ("card", f"{card.name}{f' x {card.count}' if card.count > 1 else ''}"),
    ]


def _batch(config: TrainingConfig | None) -> list[tuple[str, str]]:
    """The batch equation of a run without a plan."""
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

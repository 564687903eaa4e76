"""What a run's evaluations found, as a whole and by named sets, and what the model wrote meanwhile."""

from collections.abc import Iterator

from framework.escaping import escape
from framework.reports.page import table
from framework.reports.run_curves import chosen, plain
from framework.reports.run_files import Run

MOST_OPEN = 8
"""Evaluations up to which their table is unfolded."""
MOST_METRICS = 6
"""Columns of a table of evaluations; `metrics.jsonl` has all."""
MOST_SAMPLES, MOST_LETTERS = 20, 4000
"""Prompts, and characters of each completion; `samples.jsonl` has all."""


def evaluation_parts(run: Run) -> Iterator[str]:
    """The metrics of all held-out rows next to the loss, where there are any, and those of each named set."""
    evals = run.metrics.evals
    names = list(dict.fromkeys(name for values in evals.values() for name in values))
    of_sets = {name: name.partition("/") for name in names if name.partition("/")[0] in names and "/" in name}
    sets = list(dict.fromkeys(part for _, _, part in of_sets.values()))
    whole = [name for name in names if name not in of_sets][:MOST_METRICS]  # python/NAME is of all rows, too
    losses = [step for step, _ in run.metrics.evaluated("eval_loss").points]
    best = {min(losses, key=lambda step: evals[step]["eval_loss"] or 0.0)} if losses else set()
    steps = chosen(sorted(evals), best)
    if len(whole) < 2 and not sets:
        return
    yield "<h2>Evaluations</h2>"
    shown = " open" if len(steps) <= MOST_OPEN else ""
    rows = [(f"{step:,}", *(_figure(run, step, name) for name in whole)) for step in steps]
    yield f"<details{shown}><summary>All held-out rows</summary>{table(('Step', *map(_words, whole)), rows)}</details>"
    if not sets:
        return
    rows = [(f"{step:,}", *(_figure(run, step, f"eval_loss/{each}") for each in sets)) for step in steps]
    yield f"<details{shown}><summary>Loss of each set</summary>{table(('Step', *sets), rows)}</details>"
    metrics = [name for name in whole if any(f"{name}/{each}" in names for each in sets)]
    last = [(each, *(_figure(run, steps[-1], f"{name}/{each}") for name in metrics)) for each in sets]
    title = f"Each set, at step {steps[-1]:,}"
    yield f"<details open><summary>{title}</summary>{table(('Set', *map(_words, metrics)), last)}</details>"


def _figure(run: Run, step: int, name: str) -> str:
    value = run.metrics.evals[step].get(name)
    return "-" if value is None else plain(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def sample_parts(run: Run) -> Iterator[str]:
    """The completions of the last evaluation, and the earlier ones of each prompt."""
    if not run.samples:
        return
    last = run.samples[-1].step
    yield "<h2>Samples</h2>"
    yield f'<p class="soft">What the model wrote at step {last:,}, its likeliest token each time.</p>'
    for sample in [sample for sample in run.samples if sample.step == last][:MOST_SAMPLES]:
        earlier = [item for item in run.samples if item.prompt == sample.prompt and item.step < last]
        yield f'<h3 class="wrapped">{_text(sample.prompt)}</h3><pre class="wrapped">{_text(sample.completion)}</pre>'
        if earlier:
            steps = chosen([item.step for item in earlier], set())
            written = "".join(
                f'<p class="soft">Step {item.step:,}</p><pre class="wrapped">{_text(item.completion)}</pre>'
                for item in earlier
                if item.step in steps
            )
            yield f"<details><summary>Before</summary>{written}</details>"


def _text(text: str) -> str:
    return escape(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ...")

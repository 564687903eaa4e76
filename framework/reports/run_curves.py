"""Parts of a run's page: curves, planned and measured memory by phase, evaluations, and samples."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from framework.escaping import escape
from framework.reports import plan_text
from framework.reports.page import BAR, LEFT, RIGHT, ROW, WIDTH, svg, table, text
from framework.reports.plot import LARGE, SMALL, Curve, Frame, Level, Moment, plot_svg, scale_of
from framework.reports.run_files import Memory, PhasePair, Run

ROWS = 20
"""Rows of the table next to a plot: evenly spaced steps, and those of least and greatest values."""
FAR = 5
"""Multiple of the greatest curve above which the card's limit is only mentioned, since drawing it would flatten the
curves."""

Write = Callable[[float], str]


def curve_parts(run: Run) -> Iterator[str]:
    """All plots, or a sentence for each one without data."""
    if not run.metrics.steps and not run.metrics.evals:
        yield "<h2>Curves</h2>"
        yield '<p class="soft">No step was made, so there is nothing to draw.</p>'
        return
    yield from _loss(run)
    yield from _memory(run)
    yield "<h2>Speed, learning rate, gradient norm</h2>"
    yield '<div class="small">'
    for title, name, write, is_noisy in (
        ("Tokens a second, all devices", "tokens_per_second", _count, True),
        ("Gradient norm, before clipping", "grad_norm", plain, True),
        ("Learning rate", "learning_rate", plain, False),
    ):
        curve, from_zero = Curve(title, "first", run.metrics.trained(name), is_noisy=is_noisy), name != "grad_norm"
        yield f"<div><h3>{title}</h3>{''.join(_plot(title, [curve], write, frame=SMALL, from_zero=from_zero))}</div>"
    yield "</div>"


def _loss(run: Run) -> Iterator[str]:
    train = Curve("training loss", "first", run.metrics.trained("loss"), is_noisy=True)
    held_out = Curve("loss on held-out rows", "second", run.metrics.evaluated("eval_loss"), is_marked=True)
    yield "<h2>Loss</h2>"
    yield f'<p class="soft">{escape(" ".join(_last_losses(run)))}</p>'
    yield from _plot("Loss against steps", [train, held_out], plain)


def _last_losses(run: Run) -> Iterator[str]:
    """Sentences with the last losses of training and evaluation."""
    if points := run.metrics.trained("loss").points:
        yield f"Training: {plain(points[-1][1])} at step {points[-1][0]:,}."
    if points := run.metrics.evaluated("eval_loss").points:
        (first, before), (last, after) = points[0], points[-1]
        at, least = min(points, key=lambda point: point[1])
        since = f", {plain(after)} at step {last:,}, {plain(least)} at the least (step {at:,})"
        yield f"Held-out rows: {plain(before)} at step {first:,}{since if len(points) > 1 else ''}."
    elif not run.metrics.evals:
        yield "Nothing was evaluated."


def _memory(run: Run) -> Iterator[str]:
    """Memory over the steps; not drawn for the CPU, where only the whole process is measured."""
    yield "<h2>Memory, step by step</h2>"
    on_cpu = (run.memory is not None and not run.memory.is_of_card) or (
        run.environment is not None and run.environment.device.startswith("cpu")
    )
    if on_cpu:
        yield '<p class="soft">Not drawn: a run on the CPU uses no memory of a card.</p>'
        return
    curves = [
        Curve("reserved", "second", run.metrics.trained("peak_reserved_bytes")),
        Curve("allocated", "first", run.metrics.trained("peak_allocated_bytes")),
    ]
    greatest = max((value for curve in curves for _, value in curve.series.points), default=0.0)
    levels, far = _levels(run, greatest)
    _, unit = plan_text.unit_of(round(max(greatest, *(level.value for level in levels), 0.0)))
    repairs = run.memory.repairs if run.memory is not None else ()
    moments = [Moment(repair.step, f"memory ran out: {repair}") for repair in repairs]
    since = "; measured again after each repair, and the plan is for the last size" if repairs else ""
    yield f'<p class="soft">The greatest use of the run until each step, by torch\'s counters{since}.</p>'
    yield from _plot("Memory against steps", curves, _bytes, levels, moments, from_zero=True, unit=unit)
    if far:
        yield f'<p class="soft">{escape(far)}</p>'


def _levels(run: Run, greatest: float) -> tuple[list[Level], str]:
    """The planned peaks and the card's limit, or a sentence if the limit is far above everything else."""
    if run.plan is None:
        return [], "There is no plan to compare with, and so no size of the card."
    peak, device = run.plan.peak, run.plan.device
    levels = [
        Level("planned to be reserved", "second dashed", peak.reserved_bytes),
        Level("planned to be allocated", "first dashed", peak.allocated_bytes),
    ]
    if device.usable_bytes is None:
        return levels, f"How much of {device.name} is usable is not known."
    whole = f", of {plan_text.size(device.capacity_bytes)} in all" if device.capacity_bytes else ""
    limit = f"usable on {device.name}{whole}"
    if device.usable_bytes > FAR * max(greatest, peak.reserved_bytes):
        return levels, f"Far above all of this: {plan_text.size(device.usable_bytes)} are {limit}."
    return [Level(limit, "limit", device.usable_bytes), *levels], ""


def _plot(
    title: str,
    curves: Sequence[Curve],
    write: Write,
    levels: Sequence[Level] = (),
    moments: Sequence[Moment] = (),
    frame: Frame = LARGE,
    from_zero: bool = False,
    unit: float = 1.0,
) -> Iterator[str]:
    """Drawing, legend, omissions, and table."""
    drawn = [curve for curve in curves if curve.series.points]
    if not drawn:
        broken = any(curve.series.broken for curve in curves)
        reason = "no value is finite" if broken else "metrics.jsonl has no such metric"
        yield f'<p class="soft">Not drawn: {reason}.</p>'
        return
    drawing = plot_svg(title, drawn, write, levels, moments, frame, from_zero, unit)
    yield f'<div class="frame{" wide" if frame is LARGE else ""}" tabindex="0">{drawing}</div>'
    if frame is LARGE:
        small = plot_svg(title, drawn, write, levels, moments, SMALL, from_zero, unit)
        yield f'<div class="narrow">{small}</div>'  # for phones, where most of the large one would be out of sight
        keys = [(curve.style, curve.name) for curve in drawn]
        keys += [(level.style, f"{level.name}: {write(level.value)}") for level in levels]
        keys += [("moment", f"{moment.name}") for moment in moments]
        spans = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for style, name in keys)
        yield f'<p class="legend">{spans}</p>'
    for line in _remarks(curves, levels, from_zero):
        yield f'<p class="soft">{escape(line)}</p>'
    found = [dict(curve.series.points) for curve in drawn]
    ends = {end(curve, key=curve.__getitem__) for curve in found for end in (min, max)}
    steps = chosen(sorted({step for curve in found for step in curve}), ends)
    rows = [(f"{step:,}", *(write(curve[step]) if step in curve else "-" for curve in found)) for step in steps]
    figures = table(("Step", *(curve.name.lower() for curve in drawn)), rows)
    yield f"<details><summary>Figures: {escape(title.lower())}</summary>{figures}</details>"


def _remarks(curves: Sequence[Curve], levels: Sequence[Level], from_zero: bool) -> Iterator[str]:
    for curve in curves:
        _, around = curve.mean
        if around:
            yield f"The strong line is the mean of {around:,} values."
        if broken := curve.series.broken:
            first = ", ".join(f"{step:,}" for step in broken[:5])
            more = f" and {len(broken) - 5:,} more" if len(broken) > 5 else ""
            steps = "step" if len(broken) == 1 else "steps"
            yield f"Not finite, marked at the upper edge: {curve.name.lower()} at {steps} {first}{more}."
    values = [value for curve in curves for _, value in curve.series.points]
    if scale_of([*values, *(level.value for level in levels)], from_zero).is_logarithmic:
        yield "The scale is logarithmic."


def chosen(steps: Sequence[int], always: set[int]) -> list[int]:
    """At most ROWS evenly spaced steps, including the first, the last, and those of `always`."""
    if len(steps) <= ROWS:
        return list(steps)
    even = {steps[round(number * (len(steps) - 1) / (ROWS - 1))] for number in range(ROWS)}
    return sorted(even | always)


def plain(value: float) -> str:
    """Format a number with four digits."""
    return f"{value:.4g}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _bytes(value: float) -> str:
    return plan_text.size(round(value))


PAIR = ROW + 10
"""Height of the two bars of a phase, in units of the view box."""


def memory_parts(run: Run) -> Iterator[str]:
    """Predicted and measured memory by phase, as far as available, with reasons for missing parts."""
    yield "<h2>Memory by phase, planned and measured</h2>"
    memory = run.memory
    if memory is None or not memory.phases:
        written = "memory.json is written at the end of a run, and where its memory ran out in a step"
        plan = "; only the plan" if run.plan is not None else ", and there is no plan"
        yield f'<p class="soft">{escape(f"{written}: nothing measured{plan}.")}</p>'
        if run.plan is not None:
            rows = [
                (plan_text.phase_name(phase.name), plan_text.size(phase.allocated_bytes)) for phase in run.plan.phases
            ]
            yield table(("Phase", "planned"), rows)
    elif memory.is_of_card:
        card = f" on {memory.device_name}" if memory.device_name else ""
        sentence = f"Allocated bytes{card}. {_sentence(memory)}"
        yield f'<p class="soft">{escape(sentence)}</p>'
        yield f'<div class="frame" tabindex="0">{pairs_svg(memory.phases)}</div>'
        keys = (("first", "planned"), ("second", "measured"))
        spans = "".join(f'<span><i class="key {style}"></i>{name}</span>' for style, name in keys)
        yield f'<p class="legend">{spans}</p>'
        yield _pairs(memory, "measured")
    else:
        yield (
            '<p class="soft">A run on the CPU has no allocator to ask: the memory of the process was read in place of '
            f"tensors, so the two are not drawn against each other. {escape(_sentence(memory))}</p>"
        )
        yield _pairs(memory, "the process grew by")
    if memory is not None and memory.growth_bytes is not None:
        grown = plan_text.size(memory.growth_bytes)
        yield f'<p class="warn">Memory that stays allocated grew by {grown} per step: something keeps it.</p>'
    yield from _speed(run)


def _sentence(memory: Memory) -> str:
    return f"{memory.sentence[:1].upper()}{memory.sentence[1:]}."


def _pairs(memory: Memory, measured: str) -> str:
    """Table of phases, with errors only if both sides measure the same thing."""
    rows = []
    for pair in (*memory.phases, memory.peak):
        row = plan_text.phase_name(pair.name), _size(pair.predicted), _size(pair.measured)
        rows.append((*row, plan_text.error(pair.error)) if memory.is_of_card else row)
    heading = "Phase", "planned", measured
    return table((*heading, "error") if memory.is_of_card else heading, rows)


def _size(count: int | None) -> str:
    return "-" if count is None else plan_text.size(count)


def pairs_svg(pairs: tuple[PhasePair, ...]) -> str:
    """Two bars for each phase: planned, and below it measured."""
    longest = max((count for pair in pairs for count in (pair.predicted, pair.measured) if count), default=1)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = []
    for number, pair in enumerate(pairs):
        top = PAIR * number + 4.0
        parts.append(text(LEFT - 10, top + PAIR / 2 - 4, plan_text.phase_name(pair.name), "end"))
        for style, name, count, at in (
            ("first", "planned", pair.predicted, top),
            ("second", "measured", pair.measured, top + BAR * 0.8),
        ):
            if count:
                parts.append(
                    f'<rect class="{style}" x="{LEFT}" y="{at:.1f}" width="{max(count, 0) * scale:.2f}" '
                    f'height="{BAR * 0.7:.1f}"><title>{name} {plan_text.size(count)}</title></rect>'
                )
                parts.append(text(WIDTH, at + BAR * 0.35, plan_text.size(count), "end"))
    return svg(WIDTH, PAIR * len(pairs) + 6, "Allocated bytes by phase, planned and measured", parts)


def _speed(run: Run) -> Iterator[str]:
    """Step time: of the plan, for rows of maximum length, and the run's median."""
    seconds = [value for _, value in run.metrics.trained("step_seconds").points]
    if not seconds:
        return
    yield "<h2>Time of a step</h2>"
    middle = median(seconds)
    name, planned, error = "planned, all rows of maximum length", "not known", ""
    if run.plan is not None and run.plan.step is not None:
        expected = run.plan.step.seconds
        planned, error = plan_text.duration(expected), plan_text.error(expected / middle - 1) if middle > 0 else ""
    measured = f"measured, median of {len(seconds):,} step{'s' if len(seconds) > 1 else ''}"
    yield table(
        ("Step", "time", "error"),
        [(name, planned, error), (measured, plan_text.duration(middle), "")],
    )


MOST_OPEN = 8
"""Most evaluations in an unfolded table."""
MOST_METRICS = 6
"""Most columns of a table of evaluations; `metrics.jsonl` has all."""
MOST_SAMPLES, MOST_LETTERS = 20, 4000
"""Most prompts, and characters of each completion; `samples.jsonl` has all."""


def evaluation_parts(run: Run) -> Iterator[str]:
    """Tables of the metrics over all held-out rows, and of each named set."""
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
    yield f"<details{shown}><summary>All held-out rows</summary>{table(('Step', *map(_label, whole)), rows)}</details>"
    if not sets:
        return
    rows = [(f"{step:,}", *(_figure(run, step, f"eval_loss/{each}") for each in sets)) for step in steps]
    yield f"<details{shown}><summary>Loss of each set</summary>{table(('Step', *sets), rows)}</details>"
    metrics = [name for name in whole if any(f"{name}/{each}" in names for each in sets)]
    last = [(each, *(_figure(run, steps[-1], f"{name}/{each}") for name in metrics)) for each in sets]
    title = f"Each set, at step {steps[-1]:,}"
    yield f"<details open><summary>{title}</summary>{table(('Set', *map(_label, metrics)), last)}</details>"


def _figure(run: Run, step: int, name: str) -> str:
    value = run.metrics.evals[step].get(name)
    return "-" if value is None else plain(value)


def _label(name: str) -> str:
    return name.replace("_", " ")


def sample_parts(run: Run) -> Iterator[str]:
    """Completions of the last evaluation, and earlier ones of each prompt."""
    if not run.samples:
        return
    last = run.samples[-1].step
    yield "<h2>Samples</h2>"
    yield f'<p class="soft">Greedy completions at step {last:,}.</p>'
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

"""Planned next to measured, phase by phase: the bars of a run's page, and the table next to them."""

from collections.abc import Iterator
from statistics import median

from framework.escaping import escape
from framework.reports import plan_text
from framework.reports.drawing import BAR, LEFT, RIGHT, ROW, WIDTH, svg, text
from framework.reports.page import table
from framework.reports.run_files import Memory, PhasePair, Run

PAIR = ROW + 10
"""Height of the two bars of a phase, in units of the view box."""


def memory_parts(run: Run) -> Iterator[str]:
    """What was predicted and what was measured; what there is of both, and why the rest is not shown."""
    yield "<h2>Memory by phase, planned and measured</h2>"
    memory = run.memory
    if memory is None or not memory.phases:
        written = "memory.json is written at the end of a run, and where its memory ran out in a step"
        plan = "; the plan alone" if run.plan is not None else ", and there is no plan"
        yield f'<p class="soft">{escape(f"{written}: nothing measured{plan}.")}</p>'
        if run.plan is not None:
            rows = [
                (plan_text.phase_name(phase.name), plan_text.size(phase.allocated_bytes)) for phase in run.plan.phases
            ]
            yield table(("Phase", "planned"), rows)
    elif memory.is_of_card:
        yield f'<p class="soft">{escape(_on(memory))}</p>'
        yield f'<div class="frame" tabindex="0">{pairs_svg(memory.phases)}</div>'
        yield _legend()
        yield _pairs(memory, "measured")
    else:
        yield (
            '<p class="soft">A run on the CPU has no allocator to ask: the memory of the process was read in place of '
            f"tensors, so the two are not drawn against each other. {escape(_sentence(memory))}</p>"
        )
        yield _pairs(memory, "the process grew by")
    if memory is not None and memory.growth_bytes is not None:
        grown = plan_text.size(memory.growth_bytes)
        yield f'<p class="warn">What stayed allocated grew by {grown} a step: something was kept from step to step.</p>'
    yield from _speed(run)


def _on(memory: Memory) -> str:
    card = f" on {memory.device_name}" if memory.device_name else ""
    return f"Allocated bytes{card}. {_sentence(memory)}"


def _sentence(memory: Memory) -> str:
    return f"{memory.sentence[:1].upper()}{memory.sentence[1:]}."


def _pairs(memory: Memory, measured: str) -> str:
    """The error stands only where both sides are of the same thing."""
    rows = []
    for pair in (*memory.phases, memory.peak):
        row = plan_text.phase_name(pair.name), _size(pair.predicted), _size(pair.measured)
        rows.append((*row, plan_text.error(pair.error)) if memory.is_of_card else row)
    heading = "Phase", "planned", measured
    return table((*heading, "error") if memory.is_of_card else heading, rows)


def _size(count: int | None) -> str:
    return "-" if count is None else plan_text.size(count)


def pairs_svg(pairs: tuple[PhasePair, ...]) -> str:
    """Two bars for each phase: what was planned, and below it what was measured."""
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


def _legend() -> str:
    keys = (("first", "planned"), ("second", "measured"))
    spans = "".join(f'<span><i class="key {style}"></i>{name}</span>' for style, name in keys)
    return f'<p class="legend">{spans}</p>'


def _speed(run: Run) -> Iterator[str]:
    """The time of a step: of the plan, whose rows are all of the greatest length, and the median of the run."""
    seconds = [value for _, value in run.metrics.trained("step_seconds").points]
    if not seconds:
        return
    yield "<h2>Time of a step</h2>"
    middle = median(seconds)
    name, planned, error = "planned, every row as long as it may be", "not known", ""
    if run.plan is not None and run.plan.step is not None:
        expected = run.plan.step.seconds
        planned, error = plan_text.duration(expected), plan_text.error(expected / middle - 1) if middle > 0 else ""
    measured = f"measured, median of {len(seconds):,} step{'s' if len(seconds) > 1 else ''}"
    yield table(
        ("Step", "time", "error"),
        [(name, planned, error), (measured, plan_text.duration(middle), "")],
    )

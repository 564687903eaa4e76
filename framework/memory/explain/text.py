"""Text of an explanation: what, where and why, the subtraction, what to do. No torch."""

from collections.abc import Iterator

from framework.memory.explain import Explanation
from framework.memory.explain.causes import (
    Cause,
    allowed_left,
    growth_per_step,
    held_by_others,
    is_limited,
    unaccounted_bytes,
)
from framework.memory.explain.messages import Message
from framework.memory.explain.shapes import HANDLE, RANKS_SHARE, Kind, Space
from framework.memory.units import size
from framework.schema.plural import counted

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Variable for the allocator's settings if the message names none. Before torch 2.9: PYTORCH_CUDA_ALLOC_CONF."""
MOST_MOVES = 12
MOST_WORDS = 400
_HEADS = {Kind.NAN: "a value is not finite", Kind.HANG: "processes waited for a rank that did not answer"}
_PHASES = {"optimizer_step": "the optimizer step", "start": "the start from rows"}
_CAUSES = {
    Cause.CAPACITY: "more memory is needed at that moment than there is",
    Cause.FRAGMENTATION: "enough is reserved and not in use, but fragmented",
    Cause.OTHER_PROCESS: "other processes hold the missing memory",
    Cause.GROWTH: "the memory that stays allocated grew from step to step",
    Cause.SPIKE: "this micro-batch is much larger than all before it",
    Cause.HOST: "the host's memory ran out, not the card's",
    Cause.UNKNOWN: "the text has no figures that decide why",
}


def explanation_lines(explanation: Explanation) -> list[str]:
    """All lines, without markup, for any terminal."""
    return [*cause_lines(explanation), *_move_lines(explanation)]


def cause_lines(explanation: Explanation) -> list[str]:
    """All lines except the overrides: what failed and why, and advice beyond overrides."""
    kind, step = explanation.message.kind, explanation.circumstances.step
    head = _HEADS.get(kind, "out of memory")
    if explanation.phase is not None:
        named = _PHASES.get(explanation.phase, explanation.phase)
        head += f" in {named.replace('the', 'the first') if explanation.is_first_step else named}"
    if step is not None:
        head += f" (step {step})"
    head = f"{head}: {_CAUSES[explanation.cause]} [{explanation.cause}]" if kind is Kind.OUT_OF_MEMORY else head
    lines = [head, f"  {explanation.message.excerpt[:MOST_WORDS]}"]
    if writers := explanation.message.writers:
        rest = f"; then of {', '.join(writers[1:])}" if writers[1:] else ""
        lines.append(f"  first of {writers[0]}{rest}")
    if explanation.message.kind is not Kind.OUT_OF_MEMORY:
        of_rows = "memory has nothing to do with it: look at the rows of that step, the learning rate, and float16"
        of_ranks = "one rank did not come: look for the first error of any rank before this, out of memory or another"
        return [*lines, of_rows if kind is Kind.NAN else of_ranks]
    lines += [*_subtraction(explanation.message), *_facts(explanation)]
    return [*lines, *(f"first: {text}" for text in _advice(explanation))]


def _subtraction(message: Message) -> Iterator[str]:
    """The subtraction: the card less everything in use, down to free and missing bytes."""
    if message.capacity_bytes is None:
        if message.request_bytes is not None:
            yield f"  {size(message.request_bytes):>12}  were asked for"
        return
    allocated, unused = message.allocated_bytes, message.reserved_unallocated_bytes
    outside = message.outside_bytes
    if message.process_bytes is not None and allocated is not None:
        outside = max(message.process_bytes - allocated - (unused or 0), 0)
    ids = ", ".join(f"process {number} {size(held)}" for number, held in message.others)
    held: tuple[tuple[int | None, str], ...] = (
        (allocated, "in use by PyTorch"),
        (unused, "reserved by PyTorch, not in use"),
        (outside, "this process outside PyTorch (context, kernels, libraries)"),
        (message.other_process_bytes, f"other processes: {ids}"),
        (unaccounted_bytes(message), "not accounted for: the driver, and processes that are not named"),
    )
    free, left = message.free_bytes, "free"
    yield f"  {size(message.capacity_bytes):>12}  in all"
    if is_limited(message):  # what others hold, and what is free on the card, decided nothing
        held, free, left = held[:2], allowed_left(message), "left of what is allowed"
        yield f"  {size(message.allowed_bytes or 0):>12}  of it allowed to PyTorch in this process"
    yield from (f"- {size(count):>12}  {what}" for count, what in held if count)
    if free is not None:
        yield f"= {size(free):>12}  {left}"
    if message.request_bytes is not None:
        missing = message.request_bytes - (free or 0)
        more = f", {size(missing)} more than was {left}" if free is not None and missing > 0 else ""
        yield f"  {size(message.request_bytes):>12}  were asked for{more}"


def _facts(explanation: Explanation) -> Iterator[str]:
    """Facts known from the run in addition to the message."""
    known, message = explanation.circumstances, explanation.message
    if explanation.planned_bytes is not None:
        held = f", {size(message.allocated_bytes)} were in use" if message.allocated_bytes is not None else ""
        yield f"plan: {size(explanation.planned_bytes)} allocated at the peak of {explanation.phase}{held}"
    if explanation.state_bytes is not None:
        free = f"; {size(message.free_bytes)} were free" if message.free_bytes is not None else ""
        yield f"the optimizer creates its states in its first step: {size(explanation.state_bytes)}{free}"
    if (growth := growth_per_step(known.floors)) is not None:
        left = (
            f", {counted(message.free_bytes // growth, 'step of it was', 'steps of it were')} left"
            if message.free_bytes
            else ""
        )
        yield f"memory that stays allocated grew by {size(growth)} per step in the last steps{left}"
    if known.batch and known.largest_batch:
        yield f"micro-batch: {counted(known.batch, 'token')}; the largest before it: {known.largest_batch:,}"
    for repair in known.repairs:
        yield f"repaired: {repair}; the global batch is unchanged"


def _advice(explanation: Explanation) -> Iterator[str]:
    """Advice beyond overrides."""
    message = explanation.message
    if is_limited(message):
        free = f"; {size(message.free_bytes)} of the card were free" if message.free_bytes else ""
        yield f"a memory fraction allows {size(message.allowed_bytes or 0)} (set_per_process_memory_fraction){free}"
    if message.name == HANDLE:
        yield "cuBLAS could not start, most often for lack of memory outside PyTorch's; else it does not fit the driver"
    if explanation.cause is Cause.FRAGMENTATION:
        idle = size(message.reserved_unallocated_bytes or 0)
        setting = f"{message.variable or ALLOCATOR}=expandable_segments:True"
        yield f"expandable segments can use the idle {idle}: the first override, in other tools {setting}"
    elif explanation.cause is Cause.OTHER_PROCESS:
        held, tool = size(held_by_others(message) or 0), "rocm-smi" if "HIP" in message.excerpt else "nvidia-smi"
        yield f"`{tool}` names the process with up to {held}; end it, or use another card with CUDA_VISIBLE_DEVICES"
    elif explanation.cause is Cause.GROWTH:
        yield "find what is kept from step to step, such as losses in a list with their graphs; less memory only delays"
    elif explanation.cause is Cause.SPIKE:
        yield "limit the longest rows with model.model_max_length, or halve the micro-batch"
    elif explanation.cause is Cause.HOST:
        yield from _host_advice(message)
    elif not is_limited(message) and (message.free_bytes or 0) > (message.request_bytes or 0) > 0:
        yield "more was free than requested: check limits of the driver (Windows, WSL) and other processes"


def _host_advice(message: Message) -> Iterator[str]:
    if message.name in ("torchelastic", "launcher", "killed"):
        yield "a process was killed from outside, most often by the kernel for lack of memory; `dmesg` shows if so"
    if message.name in ("shared memory", "loader"):
        yield "give the container more shared memory (`--shm-size`, /dev/shm), or set data.workers=0"
    if message.name == RANKS_SHARE:
        yield "NCCL's ranks share /dev/shm: give the container more of it (`--shm-size=1g`, `--ipc=host`)"
        return
    if message.name == "pinned" or message.space is Space.CARD:
        yield "host memory could not be pinned: fewer processes a machine, or less offloading to host memory"
    yield "give the job more host memory, fewer data.workers, and no offloading to the host"


def _move_lines(explanation: Explanation) -> Iterator[str]:
    moves = explanation.moves[:MOST_MOVES]
    if not moves:
        return
    if explanation.has_plan:
        yield f"overrides to paste, by what each saves in {explanation.phase or 'the peak of the step'}:"
    else:
        yield "overrides to paste (without the run's plan.json their savings are not known):"
    width = max(len(move.override) for move in moves)
    for move in moves:
        saved = f"{size(move.saves_bytes):>11}" if move.saves_bytes is not None else f"{'?':>11}"
        result = "same results" if move.exact else "other results"
        yield f"  {move.override:{width}}  {saved}  {result}; {move.costs}"

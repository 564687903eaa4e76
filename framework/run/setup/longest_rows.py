"""Before the first step: the longest rows of training and of evaluation, so that what will not fit fails at once.

Forward and backward as in training, without an update: gradients are dropped and generators set back, so nothing that
is trained on depends on it. It costs about one step. On a card every run makes the trial; on the CPU, where the system
ends a process rather than give it an error, only one that asked to shrink.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from framework.build.data.batches import GlobalBatches, MicroBatch, MicroBatches, full_batch, longest_rows
from framework.build.data.packing import Packs, on_device
from framework.build.data.rows import Rows
from framework.build.place import Place
from framework.memory.ledger import Plan
from framework.memory.units import size
from framework.run.evaluate import evaluate
from framework.run.oom.retry import attempts
from framework.run.oom.smaller_batches import EVAL, TRAIN, size_of
from framework.run.session import Session
from framework.run.step import trial_step
from framework.schema.choices import OnOutOfMemory

MOST_MICRO_BATCHES = 2
"""The second adds to the gradients of the first; all others are like it."""
PIECE = 1 << 28
"""Bytes of one block of the stand-in for optimizer states."""


def try_longest_rows(session: Session) -> None:
    """Make the trial where it is due, and say what it took.

    What does not fit is repaired as in a step (`training.on_oom`). Raises OutOfMemory when it cannot be.
    """
    place, config = session.assembly.place, session.config
    if place.kind == "cpu" and config.training.on_oom is not OnOutOfMemory.SHRINK:
        return
    started = time.perf_counter()
    with session.meter.apart():
        standing_in = _standing_in(session)
        said = [*_try_evaluation(session), *_try_training(session)]
        peak = session.meter.allocated
        standing_in.clear()
    if place.kind == "cuda":
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - started
    session.progress.say(f"trial     the longest rows ({', '.join(said)}) ran in {seconds:.1f} s, peak {size(peak)}")


def _try_training(session: Session) -> Iterator[str]:
    for attempt in attempts(session, TRAIN):
        with attempt as attempt_state:
            batch = _longest_of_training(session)
            made = [batch] * min(session.config.batch.accumulation, MOST_MICRO_BATCHES)
            session.watch.begin(None, [batch["input_ids"].numel()] * len(made))
            trial_step(session.assembly, made, session.watch.observe)
            attempt_state.undo()
    yield f"training {_shape(batch)}"


def _try_evaluation(session: Session) -> Iterator[str]:
    if session.inputs.data.eval is None:
        return
    for attempt in attempts(session, EVAL):
        with attempt as attempt_state:
            batch = _longest(session, session.inputs.data.eval, EVAL)
            evaluate(session.assembly, [batch], session.watch.observe)
            attempt_state.undo()
    yield f"evaluation {_shape(batch)}"


def _longest_of_training(session: Session) -> MicroBatch:
    """One batch of the longest rows there are; of a stream, of the longest that may come."""
    if isinstance(session.batches, GlobalBatches):
        return _longest(session, session.batches.rows, TRAIN)
    config, head = session.config, session.inputs.data.train
    row = (head[0]["input_ids"] * config.longest)[: config.longest]
    ids = torch.tensor([row] * size_of(config, TRAIN), device=session.assembly.place.device)
    return full_batch(config, ids)


def _longest(session: Session, rows: Rows | Packs, key: str) -> MicroBatch:
    """One batch of the longest rows there are."""
    config = session.config
    batches = MicroBatches(rows, session.batches.pad_token_id, config.data.padding_free, config.padded(1))
    chosen = longest_rows(rows.lengths, size_of(session.config, key))
    return on_device(session.assembly.place.device, batches[(chosen, True)])


def _shape(batch: MicroBatch) -> str:
    rows, tokens = batch["input_ids"].shape
    return f"{rows}x{tokens}"


def _standing_in(session: Session) -> list[Tensor]:
    """Memory of the size of the states that the optimizer will make, for from the second step on they are there.

    Their size is the plan's; without a plan, on the CPU, or when states are there already, nothing stands in.
    """
    place = session.assembly.place
    has_states = any(session.assembly.optimizer.state.values())
    if place.kind == "cpu" or has_states or session.plan is None:
        return []
    count = planned_states(session.plan)
    try:
        return stand_in(count, place)
    except torch.OutOfMemoryError:
        session.progress.say(
            f"warning   the optimizer will make {size(count)} of states in its first step: there is no room for them "
            "next to the weights; fewer rows do not help"
        )
        return []


def planned_states(plan: Plan) -> int:
    """Bytes of optimizer states on the device."""
    return next((phase.terms.optimizer for phase in plan.phases if phase.name == "optimizer_step"), 0)


def stand_in(count: int, place: Place) -> list[Tensor]:
    """`count` bytes in blocks of at most PIECE."""
    pieces = [min(PIECE, count - start) for start in range(0, count, PIECE)]
    return [torch.empty(piece, dtype=torch.uint8, device=place.device) for piece in pieces]

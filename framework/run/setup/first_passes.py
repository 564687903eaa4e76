"""Passes over rows before the first step: a trial of the longest rows, and precomputed reference log-probabilities.

The longest rows of training and evaluation run forward and backward as in training, without an update, so that a run
that will not fit fails at once. Gradients are dropped and generators reset, so training is not affected. The trial
costs about one step. On a card every run makes it; on the CPU, where the system kills a process rather than raise an
error, only a run that asked to shrink.

With `training.preference.precompute_reference` the reference model evaluates every row once. The log-probabilities are
stored in the run folder, where a resumed run, whose weights have changed, reads them.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from framework.build.data.batches import GlobalBatches, MicroBatch, MicroBatches, eval_batches, full_batch, longest_rows
from framework.build.data.packing import Packs, on_device
from framework.build.data.rows import Rows
from framework.build.losses.loss import Batch
from framework.build.place import Place
from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.ledger import Plan
from framework.memory.units import size
from framework.run.evaluate import evaluate
from framework.run.oom.retry import EVAL, TRAIN, attempts, size_of
from framework.run.record.layout import aside_of, discard
from framework.run.session import Session
from framework.run.step import reference_step, trial_step
from framework.schema.choices import OnOutOfMemory
from framework.schema.plural import counted

MOST_MICRO_BATCHES = 2
"""The second micro-batch adds to the gradients of the first; all others behave like the second."""
PIECE = 1 << 28
"""Bytes of one block of the placeholder for optimizer states."""


def try_longest_rows(session: Session) -> None:
    """Run the trial if it is due, and print time and peak memory.

    Out of memory is handled as in a step (`training.on_oom`). Raises OutOfMemory if it cannot be repaired.
    """
    place, config = session.assembly.place, session.config
    if place.kind == "cpu" and config.training.on_oom is not OnOutOfMemory.SHRINK:
        return
    started = time.perf_counter()
    with session.meter.separate():
        standing_in = _standing_in(session)
        parts = [*_try_evaluation(session), *_try_training(session)]
        peak = session.meter.allocated
        standing_in.clear()
    if place.kind == "cuda":
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - started
    session.progress.say(f"trial     the longest rows ({', '.join(parts)}) ran in {seconds:.1f} s, peak {size(peak)}")


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
    """One batch of the longest rows; for a stream, of the longest possible rows."""
    if isinstance(session.batches, GlobalBatches):
        return _longest(session, session.batches.rows, TRAIN)
    config, head = session.config, session.inputs.data.train
    row = (head[0]["input_ids"] * config.longest)[: config.longest]
    ids = torch.tensor([row] * size_of(config, TRAIN), device=session.assembly.place.device)
    return full_batch(config, ids)


def _longest(session: Session, rows: Rows | Packs, key: str) -> MicroBatch:
    """One batch of the longest rows."""
    config = session.config
    batches = MicroBatches(rows, session.batches.pad_token_id, config.data.padding_free, config.padded(1))
    chosen = longest_rows(rows.lengths, size_of(session.config, key))
    return on_device(session.assembly.place.device, batches[(chosen, True)])


def _shape(batch: MicroBatch) -> str:
    rows, tokens = batch["input_ids"].shape
    return f"{rows}x{tokens}"


def _standing_in(session: Session) -> list[Tensor]:
    """Placeholder memory for the states that the optimizer will create in the first step.

    Their size is taken from the plan; nothing is allocated without a plan, on the CPU, or if states already exist.
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
            f"warning   the optimizer will create {size(count)} of states in its first step, which do not fit in "
            "memory with the weights; fewer rows do not help"
        )
        return []


def planned_states(plan: Plan) -> int:
    """Bytes of optimizer states on the device."""
    return next((phase.terms.optimizer for phase in plan.phases if phase.name == "optimizer_step"), 0)


def stand_in(count: int, place: Place) -> list[Tensor]:
    """Allocate `count` bytes in blocks of at most PIECE."""
    pieces = [min(PIECE, count - start) for start in range(0, count, PIECE)]
    return [torch.empty(piece, dtype=torch.uint8, device=place.device) for piece in pieces]


FILE = "reference.safetensors"
KEY = "training.preference.precompute_reference"


def know_reference(session: Session) -> None:
    """Add precomputed reference log-probabilities to the rows of the session, if the config asks for them.

    Raises RequestError if a resumed run's file is missing or for other rows, SaveFailed, OutOfMemory.
    """
    if not session.config.training.asks_reference_once:
        return
    data, file, splits = session.inputs.data, session.folder.path / FILE, _splits(session)
    known = session.reference_answers or (_read(file) if session.step else _ask(session, splits))
    if session.folder.is_written and (session.reference_answers or not session.step):
        aside = aside_of(file)
        try:
            discard(aside)
            save_file(known, aside)
            os.replace(aside, file)
        except (OSError, SafetensorError) as error:
            raise SaveFailed(f"{file} could not be written: {error}") from error
    completed = {name: _with_reference(rows, known, name, file) for name, rows in splits.items()}
    session.inputs = replace(session.inputs, data=replace(data, train=completed["train"], eval=completed.get("eval")))
    assert isinstance(session.batches, GlobalBatches), "the schema refuses streaming"
    session.batches = replace(session.batches, rows=completed["train"])


def ask_before_resuming(session: Session, saved: Mapping[str, Any]) -> None:
    """Compute the reference log-probabilities of a resumed run that had none, before its checkpoint is loaded."""
    was_asked = saved["training"].get("preference", {}).get("precompute_reference", False)
    if session.config.training.asks_reference_once and not was_asked:
        session.reference_answers = _ask(session, _splits(session))


def _splits(session: Session) -> dict[str, Rows | Packs]:
    data = session.inputs.data
    return {"train": data.train} | ({"eval": data.eval} if data.eval is not None else {})


def _ask(session: Session, splits: dict[str, Rows | Packs]) -> dict[str, np.ndarray]:
    started, known = time.perf_counter(), dict[str, np.ndarray]()
    for name, rows in splits.items():
        assert isinstance(rows, Rows), "the schema refuses packing"
        for attempt in attempts(session, EVAL):
            with attempt:
                found = [_sums(session, batch) for batch in _batches(session, replace(rows, order=None))]
        if session.config.training.has_pairs:
            known[f"{name}.rejected"] = np.concatenate([sums[len(sums) // 2 :] for sums in found])
            found = [sums[: len(sums) // 2] for sums in found]
        known[name] = np.concatenate(found)
    session.meter.observe("end")
    seconds, count = time.perf_counter() - started, sum(map(len, known.values()))
    session.progress.say(f"reference {counted(count, 'answer')} evaluated in {seconds:.1f} s, kept in {FILE}")
    return known


def _batches(session: Session, rows: Rows) -> Iterable[Batch]:
    """Every row in memory, once, in order."""
    size = session.config.eval_rows
    made = eval_batches(rows, size, session.batches.pad_token_id, multiple=session.config.padded(1))
    return (on_device(session.assembly.place.device, batch) for batch in made)


def _sums(session: Session, batch: Batch) -> np.ndarray:
    sums: Tensor = reference_step(session.assembly, batch, session.meter.observe)
    if not bool(torch.isfinite(sums).all()):
        message = "the reference's log-probabilities of some row are not finite"
        raise RequestError([Problem(KEY, message, expected="weights and a dtype that compute")])
    return sums.float().cpu().numpy()


def _with_reference(rows: Rows | Packs, known: dict[str, np.ndarray], name: str, file: Path) -> Rows:
    """The rows with their reference log-probabilities. Raises RequestError if these are for other rows."""
    assert isinstance(rows, Rows), "the schema refuses packing"
    parts = [(name, rows), (f"{name}.rejected", rows.rejected)]
    held = {part: len(own.offsets) - 1 for part, own in parts if own is not None}
    if any(len(known.get(part, ())) != count for part, count in held.items()):
        message = f"{file} is for other rows than this run's"
        raise RequestError([Problem(KEY, message, expected="the run's own data, or a new run")])
    rejected = rows.rejected
    if rejected is not None:
        rejected = replace(rejected, reference=known[f"{name}.rejected"])
    return replace(rows, reference=known[name], rejected=rejected)


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        message = f"{file} cannot be read, and the model has changed since the reference was evaluated: {error}"
        raise RequestError([Problem("--resume", message, expected="the run folder as it was")]) from None

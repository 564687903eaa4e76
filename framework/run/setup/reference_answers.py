"""`training.preference.precompute_reference`: what the reference says of every row, asked once before the first step.

The answers belong to the run: they are written to its folder, and a resumed run, whose weights have moved, reads them.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from framework.build.data.batches import GlobalBatches, eval_batches
from framework.build.data.packing import Packs, on_device
from framework.build.data.rows import Rows
from framework.build.losses.loss import Batch
from framework.errors import Problem, RequestError, SaveFailed
from framework.run.oom.retry import attempts
from framework.run.oom.smaller_batches import EVAL
from framework.run.record.files import aside_of, discard
from framework.run.session import Session
from framework.run.step import reference_step
from framework.schema.plural import counted

FILE = "reference.safetensors"
KEY = "training.preference.precompute_reference"


def know_reference(session: Session) -> None:
    """Give the rows of the session what the reference says of them, where that is to be known before the first step.

    Raises RequestError when a run is resumed whose file is gone or is of other rows, SaveFailed, OutOfMemory.
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
    told = {name: _told(rows, known, name, file) for name, rows in splits.items()}
    session.inputs = replace(session.inputs, data=replace(data, train=told["train"], eval=told.get("eval")))
    assert isinstance(session.batches, GlobalBatches), "the schema refuses streaming"
    session.batches = replace(session.batches, rows=told["train"])


def ask_before_resuming(session: Session, saved: Mapping[str, Any]) -> None:
    """Ask the reference of a run that asks it once from here on, before the weights of its checkpoint are in place."""
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
    session.progress.say(f"reference {counted(count, 'answer')} asked about in {seconds:.1f} s, kept in {FILE}")
    return known


def _batches(session: Session, rows: Rows) -> Iterable[Batch]:
    """Every row that is held, once, in order."""
    size = session.config.eval_rows
    made = eval_batches(rows, size, session.batches.pad_token_id, multiple=session.config.padded(1))
    return (on_device(session.assembly.place.device, batch) for batch in made)


def _sums(session: Session, batch: Batch) -> np.ndarray:
    sums: Tensor = reference_step(session.assembly, batch, session.meter.observe)
    if not bool(torch.isfinite(sums).all()):
        message = "the reference's log-probabilities of some row are not finite"
        raise RequestError([Problem(KEY, message, expected="weights and a dtype that compute")])
    return sums.float().cpu().numpy()


def _told(rows: Rows | Packs, known: dict[str, np.ndarray], name: str, file: Path) -> Rows:
    """The rows with what was said of them. Raises RequestError when it was said of other rows."""
    assert isinstance(rows, Rows), "the schema refuses packing"
    parts = [(name, rows), (f"{name}.rejected", rows.rejected)]
    held = {part: len(own.offsets) - 1 for part, own in parts if own is not None}
    if any(len(known.get(part, ())) != count for part, count in held.items()):
        message = f"{file} is of other rows than this run's"
        raise RequestError([Problem(KEY, message, expected="the run's own data, or a new run")])
    rejected = rows.rejected
    if rejected is not None:
        rejected = replace(rejected, reference=known[f"{name}.rejected"])
    return replace(rows, reference=known[name], rejected=rejected)


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        message = f"{file} cannot be read, and the model has moved on since the reference was asked: {error}"
        raise RequestError([Problem("--resume", message, expected="the run folder as it was")]) from None

"""Memory that runs out in a step: what the step did is undone, and it is made again in smaller micro batches.

`training.on_oom: shrink` does so as often as there is something to halve; `stop` undoes the step and saves what was
learnt until then. The rows of a step and their order depend on the global batch alone, so no step is lost.
"""

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from framework.errors import OutOfMemory, SaveFailed
from framework.memory.explain.causes import Circumstances, Repair
from framework.run.attempt import Attempt, release
from framework.run.out_of_memory import explained, is_memory_failure, keep_moment
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:
    from framework.run.session import Session

Size = Literal["training.per_device_train_batch_size", "training.per_device_eval_batch_size"]
TRAIN: Size = "training.per_device_train_batch_size"
EVAL: Size = "training.per_device_eval_batch_size"


def tries(session: "Session", key: Size) -> Iterator["Try"]:
    """`for attempt in tries(..): with attempt as way_back: ...` does something until memory suffices for it.

    Each time it does not, that is told and undone, and `key` is smaller for the next try. Raises OutOfMemory, after
    saving what was learnt, when that was not asked for, nothing is left to halve, or what was done cannot be undone.
    """
    repaired = False
    while True:
        attempt = Try(session, key, repaired)
        yield attempt
        if attempt.succeeded:
            break
        repaired = True
    if repaired:
        session.plan_again()


class Try:
    """One try, as a context whose value is the way back from it."""

    def __init__(self, session: "Session", key: Size, repaired: bool) -> None:
        self._session, self._key, self._repaired = session, key, repaired
        self._way_back = Attempt(session.assembly, _shrinks(session.config) and not session.has_stepped)
        self.succeeded = False

    def __enter__(self) -> Attempt:
        return self._way_back

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.succeeded = error is None
        if error is None or not is_memory_failure(error):
            return False
        failure = _Failure(self._session, self._key, self._way_back, error)
        release(error)
        if self._way_back.can_be_undone:
            self._way_back.undo()
        if failure.repair is None:
            raise _given_up(self._session, self._way_back, failure, self._repaired) from None
        self._session.shrink(failure.repair)
        return True


class _Failure:
    """One failure as it is told: its text, its circumstances, what is kept of it, and the repair if there is one.

    Made while the memory is still full, which a snapshot shows.
    """

    def __init__(self, session: "Session", key: Size, attempt: Attempt, error: BaseException) -> None:
        known = session.watch.circumstances()
        smaller = next_size(session.config, key) if _shrinks(session.config) and attempt.can_be_undone else None
        before = size_of(session.config, key)
        phase = known.phase or session.meter.phase
        self.repair = Repair(key, before, smaller, known.step or 0, phase) if smaller is not None else None
        repairs = (*session.repairs, self.repair) if self.repair is not None else tuple(session.repairs)
        self.text = "".join(traceback.format_exception(error))
        self.circumstances: Circumstances = replace(known, repairs=repairs)
        self.kept = keep_moment(self.text, self.circumstances, session.assembly.place, session.folder.path)


def _given_up(session: "Session", attempt: Attempt, failure: _Failure, repaired: bool) -> OutOfMemory:
    """The error that ends the run; what was learnt is saved first where it is whole."""
    if repaired:
        session.plan_again()  # so that what is proposed is compared with the size that failed
    known = failure.circumstances
    lines = list(_what_was_in_hand(session, known)) if attempt.can_be_undone else []
    lines.append(_saved(session, attempt))
    folder = session.folder.path
    if failure.kept:
        lines.append(f"kept in {folder}: {', '.join(failure.kept)}; `tunesmith explain {folder}` says this again")
    with contextlib.suppress(SaveFailed):
        session.write_memory()
    return explained(failure.text, known, session.forecast, lines)


def _what_was_in_hand(session: "Session", known: Circumstances) -> Iterable[str]:
    """The rows of the micro batch that failed, by number and length, when it could not be made smaller."""
    config = session.config
    if not _shrinks(config):
        if known.phase != "eval" and next_size(config, TRAIN) is not None:
            yield "training.on_oom=shrink would halve the micro batch and go on"
        return
    if known.phase not in ("forward", "loss", "backward"):
        return
    if next_size(config, TRAIN) is None:
        data = session.inputs.data
        longest = int(data.train.lengths.max()) if data.stream is None else config.longest
        held = f"row {numbers}" if (numbers := session.rows_in_hand()) else "the longest row"
        yield (
            f"nothing is left to halve: the micro batch is 1 {'pack' if config.data.packing else 'row'} "
            f"({held}, {known.batch or 0:,} tokens); the longest of all has {longest:,}"
        )


def _saved(session: "Session", attempt: Attempt) -> str:
    """Save the last whole step, and say what there is to go on from."""
    if not attempt.can_be_undone:
        there = f"the checkpoint of step {session.saved}" if session.saved > 0 else "no checkpoint"
        return f"an update that was under way cannot be undone: there is {there} to go on from"
    if not session.step:
        return "no step was made: there is nothing to save"
    if session.assembly.ranks.world > 1:  # the others wait in the middle of a step, not to save
        there = f"the checkpoint of step {session.saved}" if session.saved > 0 else "no checkpoint"
        return f"one rank cannot save for all: there is {there} to go on from"
    try:
        session.save()
    except SaveFailed as error:
        return f"the state could not be saved: {error}"
    return f"the state after step {session.step} is saved; go on with --resume"


def _shrinks(config: TrainingConfig) -> bool:
    return config.training.on_oom is OnOutOfMemory.SHRINK


def size_of(config: TrainingConfig, key: str) -> int:
    """The rows of a batch of this kind."""
    return int(getattr(config.training, key.removeprefix("training.")))


def next_size(config: TrainingConfig, key: str) -> int | None:
    """Half the rows, or less where that would not divide the global batch; None when there is one row."""
    rows = size_of(config, key)
    of_a_step = config.batch.per_device * config.batch.accumulation if key == TRAIN else 0
    return next((size for size in range(rows // 2, 0, -1) if of_a_step % size == 0), None)


def shrunk(config: TrainingConfig, repair: Repair) -> TrainingConfig:
    """The config with the smaller size, and with as many more micro batches a step."""
    training = config.training
    changes = {repair.key.removeprefix("training."): repair.after}
    if repair.key == TRAIN and (training.global_batch_size is None or training.gradient_accumulation_steps):
        changes["gradient_accumulation_steps"] = config.batch.accumulation * repair.before // repair.after
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def remembered(
    config: TrainingConfig, saved: Sequence[Mapping[str, Any]], allow: Sequence[str]
) -> tuple[TrainingConfig, list[Repair]]:
    """The config of a resumed run with the sizes that it had shrunk to, and all repairs of the checkpoint.

    A size that was written anew, or that `--allow` lets differ, stays as it is asked for.
    """
    repairs = [Repair(**repair) for repair in saved]
    for repair in repairs:
        if repair.key not in allow and size_of(config, repair.key) == repair.before:
            config = shrunk(config, repair)
    return config, repairs

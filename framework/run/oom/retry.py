"""Out of memory in a step: the step is undone and retried with smaller micro-batches.

`training.on_oom: shrink` repeats this while a size can be halved; `stop` undoes the step and saves the state before it.
The rows of a step and their order depend on the global batch only, so no step is lost.

With data parallelism any rank may run out. It reports that before the next collective and at the end of every attempt
(`Ranks.check_in`): all ranks undo the step and retry with the same smaller size.
"""

import json
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, Protocol

from torch.distributed import DistError

from framework.build.assembly import Assembly
from framework.build.ranks import OutOfMemoryElsewhere
from framework.errors import OutOfMemory, SaveFailed
from framework.memory.explain.causes import Circumstances, Repair
from framework.memory.ledger import Plan
from framework.run.checkpoints.saver import Saving
from framework.run.inputs import Inputs
from framework.run.oom.report import PlannedRun, Watch, explained, is_memory_failure, keep_moment
from framework.run.ranks.coordinator import Coordinator
from framework.run.record.meter import Meter
from framework.run.record.run_folder import RunFolder
from framework.run.state import Attempt, release
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

Size = Literal["training.per_device_train_batch_size", "training.per_device_eval_batch_size"]
TRAIN: Size = "training.per_device_train_batch_size"
EVAL: Size = "training.per_device_eval_batch_size"


def shrinks(config: TrainingConfig) -> bool:
    """Whether the run continues after running out of memory."""
    return config.training.on_oom is OnOutOfMemory.SHRINK


def size_of(config: TrainingConfig, key: str) -> int:
    """Rows of a batch of this kind."""
    return int(getattr(config.training, key.removeprefix("training.")))


def next_size(config: TrainingConfig, key: str) -> int | None:
    """Half the rows, or less if that does not divide the global batch; None for one row."""
    rows = size_of(config, key)
    of_a_step = config.batch.per_device * config.batch.accumulation if key == TRAIN else 0
    return next((size for size in range(rows // 2, 0, -1) if of_a_step % size == 0), None)


def shrunk(config: TrainingConfig, repair: Repair) -> TrainingConfig:
    """The config with the smaller size and correspondingly more micro-batches per step."""
    training = config.training
    changes = {repair.key.removeprefix("training."): repair.after}
    if repair.key == TRAIN and (training.global_batch_size is None or training.gradient_accumulation_steps):
        changes["gradient_accumulation_steps"] = config.batch.accumulation * repair.before // repair.after
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def remembered(
    config: TrainingConfig, saved: Sequence[Mapping[str, Any]], allow: Sequence[str]
) -> tuple[TrainingConfig, list[Repair]]:
    """The config of a resumed run with the sizes it had shrunk to, and all repairs of the checkpoint.

    A size that the request changes or `--allow` names is used as requested.
    """
    repairs = [Repair(**repair) for repair in saved]
    for repair in repairs:
        if repair.key not in allow and size_of(config, repair.key) == repair.before:
            config = shrunk(config, repair)
    return config, repairs


class RetriedRun(Protocol):
    """The parts of a run that undoing and retrying a step needs."""

    config: TrainingConfig
    folder: RunFolder
    inputs: Inputs
    assembly: Assembly
    meter: Meter
    plan: Plan | None
    watch: Watch
    coordinator: Coordinator
    step: int
    repairs: list[Repair]
    saving: Saving
    has_stepped: bool

    def rows_in_hand(self) -> Sequence[int | str]:
        """Numbers of the training rows in the micro-batch at work."""
        ...

    def settle(self) -> None:
        """Wait for the step that the device is at, and log it."""
        ...

    def shrink(self, repair: Repair, where: str = "") -> None:
        """Continue with a smaller size."""
        ...

    def plan_again(self) -> None:
        """Predict the run at the size that it has shrunk to."""
        ...

    def write_memory(self) -> dict[str, Any]:
        """Write `memory.json`."""
        ...

    def save(self) -> None:
        """Save a checkpoint of the step just made."""
        ...


@dataclass(frozen=True)
class RankReport:
    """One rank's report on an attempt that failed on some. `text` is its own error; None if its memory sufficed."""

    text: str | None
    can_be_undone: bool
    host: str
    phase: str
    in_hand: str
    """The micro-batch's rows, as text."""
    known: Circumstances

    def dumped(self) -> str:
        return json.dumps(asdict(self))


def _parsed(text: str) -> RankReport:
    document = json.loads(text)
    known: dict[str, Any] = document.pop("known")
    floors, repairs = tuple(known.pop("floors")), tuple(Repair(**repair) for repair in known.pop("repairs"))
    return RankReport(**document, known=Circumstances(**known, floors=floors, repairs=repairs))


class Failure:
    """A failed attempt as all ranks see it: the first rank that ran out of memory, and what all of them do next.

    Created while the memory is still full, as a snapshot shows. `repair` is None if the run ends here.
    """

    def __init__(self, session: RetriedRun, key: str, attempt: Attempt, error: BaseException) -> None:
        ranks, config = session.coordinator.ranks, session.config
        self._session, self._number = session, len(session.repairs)
        reports = [_report(session, attempt, error)]
        if ranks.checks_in:
            texts = session.coordinator.gathered(f"failed/{self._number}", reports[0].dumped())
            reports = [_parsed(text) for text in texts]
        first = next(number for number, one in enumerate(reports) if one.text is not None)
        self.first, self.can_be_undone = reports[first], all(one.can_be_undone for one in reports)
        self.where = f"rank {first} of {ranks.world} ({self.first.host})" if ranks.checks_in else ""
        smaller = next_size(config, key) if shrinks(config) and self.can_be_undone else None
        step, before = self.first.known.step or 0, size_of(config, key)
        self.repair = Repair(key, before, smaller, step, self.first.phase) if smaller is not None else None
        repairs = (*session.repairs, *([self.repair] if self.repair is not None else []))
        self.circumstances = replace(self.first.known, repairs=repairs)
        self._kept = self._keep(first)

    def _keep(self, first: int) -> list[str]:
        """Let the failed rank write its reports into the run folder. Returns the file names."""
        session, ranks = self._session, self._session.coordinator.ranks
        kept: list[str] = []
        if not ranks.checks_in or ranks.rank == first:
            text, place = self.first.text or "", session.assembly.place
            kept = keep_moment(text, self.circumstances, place, session.folder.path)
        if not ranks.checks_in:
            return kept
        names: list[str] = json.loads(session.coordinator.gathered(f"kept/{self._number}", json.dumps(kept))[first])
        return names

    def ended(self, repaired: bool) -> OutOfMemory:
        """Save the last complete step if possible, and return the error that ends the run on every rank."""
        session, known = self._session, self.circumstances
        if repaired:
            session.plan_again()  # so that proposals are compared with the size that failed
        lines = [f"memory ran out on {self.where}"] if self.where else []
        lines += _why_not_smaller(session, self.first) if self.can_be_undone else []
        lines.append(_saved(session, self.can_be_undone))
        folder = session.folder.path
        if self._kept:
            lines.append(f"kept in {folder}: {', '.join(self._kept)}; `tunesmith explain {folder}` says this again")
        session.write_memory()

        is_shared = session.coordinator.ranks.checks_in  # the first rank explains, the others wait for it
        is_alone = is_shared or session.coordinator.ranks.world == 1
        planned = PlannedRun(session.config, session.plan, is_alone) if session.plan is not None else None

        def explain() -> str:
            return str(explained(self.first.text or "", known, planned, folder, lines))

        return OutOfMemory(session.coordinator.shared(f"explained/{self._number}", explain) if is_shared else explain())


def _report(session: RetriedRun, attempt: Attempt, error: BaseException) -> RankReport:
    known = session.watch.circumstances()
    text = "".join(traceback.format_exception(error)) if is_memory_failure(error) else None
    is_last = next_size(session.config, TRAIN) is None
    in_hand = f"row {rows}" if is_last and (rows := session.rows_in_hand()) else "the longest row"
    phase = known.phase or session.meter.phase
    return RankReport(text, attempt.can_be_undone, socket.gethostname(), phase, in_hand, known)


def _why_not_smaller(session: RetriedRun, report: RankReport) -> Iterator[str]:
    """Lines on why the failed micro-batch was not made smaller, with its rows and their length."""
    config, known = session.config, report.known
    exchanges = config.fsdp.is_sharded or config.sharing > 1
    if not shrinks(config):
        if known.phase != "eval" and next_size(config, TRAIN) is not None and not exchanges:
            yield "training.on_oom=shrink would halve the micro-batch and continue"
        return
    if known.phase not in ("forward", "loss", "backward"):
        return
    if next_size(config, TRAIN) is None:
        data = session.inputs.data
        longest = int(data.train.lengths.max()) if data.stream is None else config.longest
        yield (
            f"nothing is left to halve: the micro-batch is 1 {'pack' if config.data.packing else 'row'} "
            f"({report.in_hand}, {counted(known.batch or 0, 'token')}); the longest of all has {longest:,}"
        )


def _saved(session: RetriedRun, can_be_undone: bool) -> str:
    """Save the last complete step, and name the state to resume from."""
    config, ranks = session.config, session.coordinator.ranks
    if not can_be_undone:
        return f"an update in progress cannot be undone: there is {_newest(session)} to resume from"
    if not session.step:
        return "no step was made: there is nothing to save"
    if ranks.world > 1 and not ranks.checks_in:  # the others wait in the middle of a step, not for a save
        if config.fsdp.is_sharded or config.sharing > 1:
            why = "the ranks communicate in every layer, and the others wait for this one there: all of them stop"
        else:
            why = "one rank cannot save for all"
        return f"{why}; there is {_newest(session)} to resume from"
    try:
        session.save()
    except SaveFailed as error:
        return f"the state could not be saved: {error}"
    return f"the state after step {session.step} is saved; continue with --resume"


def _newest(session: RetriedRun) -> str:
    step = session.saving.newest()
    return f"the checkpoint of step {step}" if step else "no checkpoint"


def attempts(session: RetriedRun, key: Size) -> Iterator["RetriedAttempt"]:
    """Repeat something until memory suffices: `for attempt in attempts(..): with attempt as state: ...`.

    After each failure the attempt is undone and `key` gets smaller for the next one. Raises OutOfMemory, after saving,
    if shrinking was not asked for, nothing is left to halve, or the attempt cannot be undone.
    """
    repaired = False
    while True:
        attempt = RetriedAttempt(session, key, repaired)
        yield attempt
        if attempt.succeeded:
            break
        repaired = True
    if repaired:
        session.plan_again()


class RetriedAttempt:
    """One attempt, as a context whose value can undo it. It succeeds on all ranks or on none."""

    def __init__(self, session: RetriedRun, key: Size, repaired: bool) -> None:
        self._session, self._key, self._repaired = session, key, repaired
        self._undo_state = Attempt(session.assembly, shrinks(session.config) and not session.has_stepped)
        self.succeeded = False

    def __enter__(self) -> Attempt:
        return self._undo_state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        found = self._found(error)
        self.succeeded = found is None
        if found is None or not (isinstance(found, OutOfMemoryElsewhere) or _is_own(found)):
            return False
        self._session.settle()  # the previous step is complete
        failure = Failure(self._session, self._key, self._undo_state, found)
        release(found)
        if failure.can_be_undone:
            self._undo_state.undo()
        if failure.repair is None:
            raise failure.ended(self._repaired) from None
        self._session.shrink(failure.repair, failure.where)
        return True

    def _found(self, error: BaseException | None) -> BaseException | None:
        """The error of this rank, or else of another one, after all ranks have checked in."""
        if isinstance(error, OutOfMemoryElsewhere):  # already exchanged
            return error
        ranks = self._session.coordinator.ranks
        try:
            if error is None:
                ranks.check_in()
            elif _is_own(error):
                ranks.check_in(has_failed=True)
        except OutOfMemoryElsewhere as elsewhere:
            return elsewhere
        return error


def _is_own(error: BaseException) -> bool:
    """Whether memory ran out in this rank's own work: a failed collective cannot be undone by one side."""
    return is_memory_failure(error) and not isinstance(error, DistError)

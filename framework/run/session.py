"""State of a run while it trains, and the work around each step: logging, evaluation, saves."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from framework.build.assembly import Assembly
from framework.build.data.batches import GlobalBatches, WorkersDied, rows_and_tokens
from framework.build.data.packing import document_lengths, on_device, pinned
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.levers.compiled import newly_plain
from framework.build.losses.loss import Batch
from framework.build.verify import FirstStep, Reading, missing_gradients, verify_emptied_cache, verify_first_step
from framework.errors import (
    BrokenRows,
    Interrupted,
    NonFinite,
    RequestError,
    SaveFailed,
    TunesmithError,
    VerificationFailed,
    WorkersLost,
)
from framework.memory.explain.causes import Repair
from framework.memory.ledger import Plan
from framework.run.best import Best
from framework.run.checkpoints.saver import Saving
from framework.run.evaluate import format_losses
from framework.run.held_out import HeldOut, Samples
from framework.run.hooks import Hooks
from framework.run.inputs import Inputs, Supply, TrainingBatches
from framework.run.oom.report import PlannedRun, Watch, explained_failures, recorded_memory
from framework.run.oom.retry import shrunk
from framework.run.ranks.coordinator import Coordinator, plan_of_all
from framework.run.ranks.signals import Interrupt
from framework.run.record.meter import SPAN, Meter, MovedElements, padding_share, planned_series, unmoved_warning
from framework.run.record.predicted_and_measured import compare
from framework.run.record.progress import ProgressLine
from framework.run.record.run_folder import RunFolder
from framework.run.record.trackers import RunLog
from framework.run.step import LaunchedStep, StepResult
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import is_due
from framework.schema.plural import counted

Planner = Callable[[TrainingConfig], Plan]
"""Predicts a run before it is loaded; the default is `plan_in_subprocess`."""


@dataclass(frozen=True)
class _Pending:
    """A step that the device still runs while the host prepares the next one, with the values to log once it is
    done."""

    step: int
    launched: LaunchedStep
    epoch: float
    rows: Sequence[int | str]
    """Its training rows if they come from a stream, which does not keep them; else none."""
    allocated: int
    reserved: int
    padding: float
    """Share of padding in this process's tokens."""


@dataclass
class Session:
    """One run between its first and its last step. `step` is the last optimizer step known to be complete; the device
    may already be running the next one."""

    config: TrainingConfig
    folder: RunFolder
    inputs: Inputs
    assembly: Assembly
    readings: tuple[Reading, ...]
    batches: TrainingBatches
    progress: ProgressLine
    meter: Meter
    plan: Plan | None
    watch: Watch
    coordinator: Coordinator = field(default_factory=Coordinator)
    planner: Planner | None = None
    step: int = 0
    read: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of tokenizer, rows and models, which a resumed run compares with its own."""
    reference_answers: dict[str, Any] | None = None
    """Log-probabilities under the reference model that a resumed run has recomputed, as arrays by split."""
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The lock of the run folder."""
    repairs: list[Repair] = field(default_factory=list)
    interrupt: Interrupt = field(default_factory=Interrupt)
    evals: list[dict[str, float]] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    best_before: Mapping[str, Any] | None = None
    """The best evaluation up to the checkpoint that the run resumes from."""
    best: Best = field(init=False)
    _clock: float = 0.0
    _first_step: FirstStep | None = None
    _pending: _Pending | None = None
    _padding: float = 0.0
    """Share of padding in the tokens of the current step."""
    _epochs: float = 0.0
    """Epochs completed before the current step."""
    has_stepped: bool = False
    """Whether this process has updated weights."""
    _log_of_run: RunLog | None = None
    _samples: Samples | None = None
    _moved_elements: MovedElements | None = None
    _began: int = field(init=False)
    saving: Saving = field(init=False)
    held_out: HeldOut = field(init=False)
    _supply: Supply = field(init=False)
    _awaits_gradients: bool = field(init=False)
    """Whether the gradients of the run's first backward pass are still to be checked."""

    def __post_init__(self) -> None:
        self._began = self.step + 1
        self._awaits_gradients = self.step == 0
        self.best = Best.of(self.config.training, self.best_before)
        self.saving, self.held_out, self._supply = Saving(self), HeldOut(self), Supply(self.progress.say)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        return self.assembly.schedule.total

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep trackers, progress bar and checkpoint writer open within the block."""
        planned = PlannedRun(self.config, self.plan, self.assembly.ranks.world == 1) if self.plan is not None else None
        with (
            contextlib.closing(RunLog(self.config, self.folder, self.progress.say)) as log,
            contextlib.closing(Samples(self, lambda texts: log.log_texts(texts, self.step))) as self._samples,
            explained_failures(self.watch, planned, self.folder.path),
            recorded_memory(self.assembly.place),
            self.progress,
            self.saving.writer,
        ):
            self._log_of_run = log
            try:
                yield
            except NonFinite as error:
                known, batches = self._pending.rows if self._pending is not None else (), self.batches
                rows = batches.all_rows_of if isinstance(batches, GlobalBatches) else batches.rows_of
                reason = f"{error} Training rows of this step: {known or rows(self.step)}."
                self.folder.write_stop(self.step + 1, reason)
                raise NonFinite(reason) from None
            finally:
                self._supply.forget()  # else its processes live until the session is collected

    def note(self, values: dict[str, float | None]) -> None:
        """Log the figures of a step or an evaluation."""
        if self._log_of_run is not None:
            self._log_of_run.log(values, self.step)

    def start(self) -> None:
        """Run what comes right before the first step: the first evaluation, a test save, the first checkpoint."""
        self.saving.create_group()
        if self.step == 0:
            if self.config.training.eval_first:
                self.evaluate()
            if done := self.saving.attempt():
                self.progress.say(f"save      {done}")
            if self.config.training.save_first:
                self.saving.save_first()
        self._epochs = round(self.batches.epochs(self.step), 4)
        self._moved_elements = MovedElements(self.assembly.trained)
        self._clock = time.perf_counter()

    def take(self, step: int) -> list[Batch]:
        """Return the micro-batches of an optimizer step, on the device. Steps have to be asked for in order."""
        try:
            made = self._supply.take(self.batches, step)
        except RequestError as error:
            raise BrokenRows(f"the rows of step {step} cannot be read; {self._saved()}\n{error}") from None
        except WorkersDied as error:
            raise WorkersLost(f"{error}; {self._saved()}. data.workers=0 needs none") from None
        self.watch.begin(step, [batch["input_ids"].numel() for batch in made])
        if not self.has_stepped:
            self._first_step = FirstStep(
                tuple(rows_and_tokens(self.config, batch) for batch in made),
                tuple(self.held_out.shapes),
                max(1, len(self.inputs.data.eval_sets)),
                documents=tuple(map(document_lengths, made)),
                joined=all("position_ids" in batch for batch in made),
                has_reference=all("reference" in batch for batch in made),
            )
        self._padding = padding_share(made)
        device = self.assembly.place.device
        return [on_device(device, pinned(device, batch)) for batch in made]

    def _saved(self) -> str:
        """Save the last step if this is the only process, and name the step that the run can resume from."""
        failure = ""
        self.settle()
        if self.step and self.assembly.ranks.world == 1:  # other ranks would be waiting in the middle of a step
            try:
                self.save()
            except SaveFailed as error:
                failure = f" ({error})"
        after = self.saving.newest()
        return (f"the state after step {after} is saved" if after else "no state is saved") + failure

    def rows_in_hand(self) -> Sequence[int | str]:
        """Row numbers of the current micro-batch, or file positions of a stream's rows; empty between two of them."""
        at, micro_batch = self.watch.step, self.watch.micro_batch
        shares = self.batches.shares_of(at - 1) if at is not None else []
        return shares[micro_batch - 1] if 0 < micro_batch <= len(shares) else []

    def shrink(self, repair: Repair, where: str = "") -> None:
        """Continue with a smaller micro-batch: each step has the same rows in the same order, split into more
        micro-batches. `where` is the rank that ran out of memory, if there are several."""
        self.repairs.append(repair)
        self.config = shrunk(self.config, repair)
        self.assembly = replace(self.assembly, config=self.config)
        self.batches = replace(self.batches, batch=self.config.batch)
        self._supply.forget()
        self.meter.forget_steps()
        self._write(lambda: self.folder.write_config(self.config))
        on = f" on {where}" if where else ""
        self.progress.say(f"out of memory{on}, step undone and retried: {repair}; batch {self.config.batch}")

    def plan_again(self) -> None:
        """Predict the run at its reduced size. The main rank does this while the others wait."""
        if self.plan is None or self.planner is None:
            return
        made: Plan | None = None
        with self.coordinator.phase("planning again"):
            if self.coordinator.ranks.is_main:
                with contextlib.suppress(TunesmithError):
                    made = self.planner(self.config)
            made = plan_of_all(self.coordinator, made, f"plan/{len(self.repairs)}")
        if made is not None:
            self.plan = made
            self.keep_plan()

    def write_memory(self) -> dict[str, Any]:
        """Write `memory.json`, predicted next to measured memory so far, and return it."""
        document = compare(self.plan, self.meter.document())
        document |= {"repairs": [repair.to_json() for repair in self.repairs], **self.watch.document()}
        self._write(lambda: self.folder.write_json("memory.json", document))
        return document

    def keep_plan(self) -> None:
        """Store the plan in the run folder."""
        if (plan := self.plan) is not None:
            self._write(lambda: self.folder.write_json("plan.json", plan.to_json()))

    def _write(self, write: Callable[[], None]) -> None:
        """Write a record of the run. A failure is a warning, since the run can continue without it."""
        try:
            write()
        except SaveFailed as error:
            self.progress.say(f"warning   {error}")

    def steps(self) -> Iterator[int]:
        """Yield the remaining optimizer steps, up to where early stopping ends the run."""
        for step in range(self.step + 1, self.total + 1):
            if self.best.ends_run:
                return
            yield step

    def observe(self, phase: str) -> None:
        """Measure memory at each phase. Raises VerificationFailed if a trained tensor has no gradient at the first
        update."""
        self.watch.observe(phase)
        if phase == "optimizer_step" and self._awaits_gradients:
            self._awaits_gradients = False
            absent = missing_gradients(self.assembly)
            if absent:
                without = counted(len(absent), "trained tensor")
                raise VerificationFailed(f"{without} got no gradient from the first backward pass, first {absent[0]}")

    def after_step(self, step: int, launched: LaunchedStep) -> None:
        """Log the previous step, which is complete by now; evaluate and save where due; stop if the user asked to.

        Raises NonFinite, and Interrupted after saving.
        """
        self.settle()
        batches = self.batches
        rows = [] if isinstance(batches, GlobalBatches) else batches.rows_of(step - 1)
        epoch = round(batches.epochs(step), 4)
        self._pending = _Pending(step, launched, epoch, rows, self.meter.allocated, self.meter.reserved, self._padding)
        # Verify that the cache was emptied the first time that it was due.
        due = self.assembly.cache.steps
        if due is not None and step % due == 0 and step - self._began < due:
            for reading in verify_emptied_cache(self.assembly, self._began, step):
                self.progress.say(f"after step {step}: {reading.key} = {reading.found} ({reading.source})")
        training, is_last = self.config.training, step == self.total
        if (growth := self.watch.end()) is not None:
            self.progress.say(f"warning   step {step}: {growth}")
        for line in self.batches.progress.account.news() if isinstance(self.batches, StreamedBatches) else ():
            self.progress.say(f"warning   step {step}: {line}")
        epochs, self._epochs = (self._epochs, epoch), epoch
        evaluates = is_due(training.eval_steps, step, self.total, epochs) and not is_last
        saves = is_due(training.save_steps, step, self.total, epochs)
        measures = (step - self._began + 1) % SPAN == 0
        if launched.is_known or not self.has_stepped or evaluates or saves or measures or is_last:
            self.settle()
        is_best = evaluates and self.evaluate()
        if saves or (is_best and self.best.is_kept):
            self.save(in_background=not is_last)
        for line in newly_plain(self.assembly.model):
            self.progress.say(f"warning   step {step}: {line}")
        # If any rank was asked to stop or cannot write, all of them stop after the same step.
        asked = self.interrupt.asked or self.saving.writer.has_failed or self.hooks.failure is not None
        is_asked_to_end = self.assembly.ranks.any(asked, self.assembly.place.device)
        if is_asked_to_end and not is_last:
            self.settle()
            self.save()  # raises the writer's failure
            stopped = f"stopped after step {step}; continue with --resume (saved in {self.folder.path})"
            self.hooks.raise_failure(stopped)
            raise Interrupted(stopped)

    def settle(self) -> None:
        """Wait for the step that the device is running and log it, so that the weights are those after `step`. Raises
        NonFinite."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            result = pending.launched.result()
        except NonFinite:
            self._pending = pending  # the error names its rows
            raise
        # The first update is verified once, before anything is logged or saved; a skipped step creates no optimizer
        # states.
        if not (result.skipped or self.has_stepped) and self._first_step is not None:
            self.has_stepped = True
            first = replace(self._first_step, began=self._began, number=pending.step)
            for reading in verify_first_step(self.assembly, first):
                self.progress.say(f"after step {self.step + 1}: {reading.key} = {reading.found} ({reading.source})")
        self.step = pending.step
        self._log(result, pending)

    def _log(self, result: StepResult, pending: _Pending) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        speed = result.tokens / seconds
        values: dict[str, float | None] = {
            "step": self.step,
            "epoch": pending.epoch,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            self.assembly.objective.unit.replace(" ", "_"): result.terms,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "peak_allocated_bytes": pending.allocated,
            "peak_reserved_bytes": pending.reserved,
            "padding_share": pending.padding,
        }
        values |= planned_series(self.config, self.plan, result.tokens, seconds)
        if self._moved_elements is not None and (self.step - self._began + 1) % SPAN == 0:
            # The share of elements that changed, with a warning if it is tiny. Not counted as step time.
            moved = self._moved_elements.measure()
            if line := unmoved_warning(moved, self.config):
                self.progress.say(f"{line} (step {self.step})")
            self._clock = time.perf_counter()
            values |= {"changed_share": moved.all, "changed_share_vectors": moved.vectors}
        if self.config.training.on_oom is OnOutOfMemory.SHRINK:
            values["per_device_train_batch_size"] = self.config.batch.per_device
        if result.busiest_expert is not None:
            values["busiest_expert_share"] = result.busiest_expert
        scale = self.assembly.loss_scale
        if scale.enabled:
            values |= {"loss_scale": scale.scaler.get_scale(), "skipped_steps": scale.skipped}
        if result.skipped:
            values["grad_norm"] = None  # JSON has no infinity
            scale_now = f"weights kept, loss scale {values['loss_scale']:g}"
            self.progress.say(f"step {self.step}: float16 gradients overflowed, {scale_now}")
        self.note(values)
        self.progress.step(self.step, result.loss, result.learning_rate, speed, pending.allocated)
        if self.hooks.on_step is not None:
            self.hooks.call(self.hooks.on_step, {**values})
            self._clock = time.perf_counter()

    def evaluate(self) -> bool:
        """Evaluate the held-out rows, if there are any, and log the result. Returns whether it is the best so far."""
        values = self.held_out.evaluate()
        if values is None:
            return False
        self.evals.append({"step": self.step, **values})
        self.note({**self.evals[-1]})
        self.progress.say(f"step {self.step}/{self.total}  {format_losses(values)}")
        self.hooks.call(self.hooks.on_eval, {**self.evals[-1]})
        if self._samples is not None:
            self._samples.write()
        self._clock = time.perf_counter()
        has_failed = self.hooks.failure is not None and self.best.metric not in values
        return self.step > 0 and not has_failed and self.best.take(self.step, values)

    def save(self, in_background: bool = False, is_last: bool = False) -> None:
        """Save a checkpoint of the last step, in the background or not (`Saving.save`). Raises SaveFailed."""
        self.saving.save(in_background, is_last)
        self._clock = time.perf_counter()

"""Everything one run holds while it trains, and what happens around each step."""

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
from framework.run.record.meter import SPAN, Meter, MovedElements, caution, padding_share, planned_series
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
"""What predicts a run before it is loaded; `plan_in_subprocess` is the product's."""


@dataclass(frozen=True)
class _Unread:
    """A step that the device makes while the host is at the next: what is to be logged of it once it is known."""

    step: int
    launched: LaunchedStep
    epoch: float
    rows: Sequence[int | str]
    """Its training rows, of a stream, which forgets them; else none."""
    allocated: int
    reserved: int
    padding: float
    """Share of this process's positions."""


@dataclass
class Session:
    """One run between its first and its last step. `step` is the last optimizer step that is known to be made; the
    device may be at the next one."""

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
    """What the tokenizer, the rows and the models that are read were, for a run that goes on from a checkpoint."""
    reference_answers: dict[str, Any] | None = None
    """Log-probabilities of a reference that a resumed run has asked anew, as arrays by split."""
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The lock of the run folder."""
    repairs: list[Repair] = field(default_factory=list)
    interrupt: Interrupt = field(default_factory=Interrupt)
    evals: list[dict[str, float]] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    best_before: Mapping[str, Any] | None = None
    """The best evaluation until the checkpoint that the run goes on from."""
    best: Best = field(init=False)
    _clock: float = 0.0
    _seen: FirstStep | None = None
    _unread: _Unread | None = None
    _padding: float = 0.0
    """Share of the positions of the step at work."""
    _epochs: float = 0.0
    """Gone through before the step at work."""
    has_stepped: bool = False
    """Whether this process has changed weights."""
    _log_of_run: RunLog | None = None
    _samples: Samples | None = None
    _moved_elements: MovedElements | None = None
    _began: int = field(init=False)
    saving: Saving = field(init=False)
    held_out: HeldOut = field(init=False)
    _supply: Supply = field(init=False)
    _awaits_gradients: bool = field(init=False)
    """Whether what the first backward pass of the run leaves was not looked at yet."""

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
        """Trackers, progress bar and the writer of checkpoints, for as long as steps are made."""
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
                known, batches = self._unread.rows if self._unread is not None else (), self.batches
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
        """What comes right before the first step: the loss that training has to beat."""
        self.saving.meet()
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
        """The micro batches of an optimizer step, on the device. Call it for one step after the other."""
        try:
            made = self._supply.take(self.batches, step)
        except RequestError as error:
            raise BrokenRows(f"the rows of step {step} cannot be had; {self._saved()}\n{error}") from None
        except WorkersDied as error:
            raise WorkersLost(f"{error}; {self._saved()}. data.workers=0 needs none") from None
        self.watch.begin(step, [batch["input_ids"].numel() for batch in made])
        if not self.has_stepped:
            self._seen = FirstStep(
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
        """Save the last step where one process can, and say what there is to go on from."""
        failure = ""
        self.settle()
        if self.step and self.assembly.ranks.world == 1:  # else the others wait in the middle of a step
            try:
                self.save()
            except SaveFailed as error:
                failure = f" ({error})"
        after = self.saving.newest()
        return (f"the state after step {after} is saved" if after else "no state is saved") + failure

    def rows_in_hand(self) -> Sequence[int | str]:
        """Numbers of the training rows in the micro batch at work, of a stream where they stand; none between two."""
        at, micro_batch = self.watch.step, self.watch.micro_batch
        shares = self.batches.shares_of(at - 1) if at is not None else []
        return shares[micro_batch - 1] if 0 < micro_batch <= len(shares) else []

    def shrink(self, repair: Repair, where: str = "") -> None:
        """Go on with a smaller size: the same rows a step in the same order, cut into more micro batches. `where` is
        the rank that ran out, where there are several."""
        self.repairs.append(repair)
        self.config = shrunk(self.config, repair)
        self.assembly = replace(self.assembly, config=self.config)
        self.batches = replace(self.batches, batch=self.config.batch)
        self._supply.forget()
        self.meter.forget_steps()
        self._write(lambda: self.folder.write_config(self.config))
        on = f" on {where}" if where else ""
        self.progress.say(f"out of memory{on}, undone and made again: {repair}; batch {self.config.batch}")

    def plan_again(self) -> None:
        """Predict the run at the size that it has shrunk to. The main rank does, the others wait."""
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
        """`memory.json`: what was predicted next to what was measured, so far."""
        document = compare(self.plan, self.meter.document())
        document |= {"repairs": [repair.to_json() for repair in self.repairs], **self.watch.document()}
        self._write(lambda: self.folder.write_json("memory.json", document))
        return document

    def keep_plan(self) -> None:
        """Store the plan in the run folder."""
        if (plan := self.plan) is not None:
            self._write(lambda: self.folder.write_json("plan.json", plan.to_json()))

    def _write(self, write: Callable[[], None]) -> None:
        """Write what tells of the run, and say where that fails: it is no reason to end it."""
        try:
            write()
        except SaveFailed as error:
            self.progress.say(f"warning   {error}")

    def steps(self) -> Iterator[int]:
        """The optimizer steps that are left, until the evaluations say that no better one is to be expected."""
        for step in range(self.step + 1, self.total + 1):
            if self.best.ends_run:
                return
            yield step

    def observe(self, phase: str) -> None:
        """Meter each phase; before the first update, every trained tensor must have a gradient."""
        self.watch.observe(phase)
        if phase == "optimizer_step" and self._awaits_gradients:
            self._awaits_gradients = False
            absent = missing_gradients(self.assembly)
            if absent:
                without = counted(len(absent), "trained tensor")
                raise VerificationFailed(f"{without} got no gradient from the first backward pass, first {absent[0]}")

    def after_step(self, step: int, launched: LaunchedStep) -> None:
        """Log the step before, which is known by now; evaluate, save; leave when the user has asked to.

        Raises NonFinite, and Interrupted after saving.
        """
        self.settle()
        batches = self.batches
        rows = [] if isinstance(batches, GlobalBatches) else batches.rows_of(step - 1)
        epoch = round(batches.epochs(step), 4)
        self._unread = _Unread(step, launched, epoch, rows, self.meter.allocated, self.meter.reserved, self._padding)
        # Read back that the cache was emptied, when it first was due.
        due = self.assembly.cache.steps
        if due is not None and step % due == 0 and step - self._began < due:
            for reading in verify_emptied_cache(self.assembly, self._began, step):
                self.progress.say(f"after step {step}: {reading.key} = {reading.found} ({reading.source})")
        training, is_last = self.config.training, step == self.total
        if (growth := self.watch.end()) is not None:
            self.progress.say(f"warning   step {step}: {growth}")
        for news in self.batches.progress.account.news() if isinstance(self.batches, StreamedBatches) else ():
            self.progress.say(f"warning   step {step}: {news}")
        epochs, self._epochs = (self._epochs, epoch), epoch
        evaluates = is_due(training.eval_steps, step, self.total, epochs) and not is_last
        saves = is_due(training.save_steps, step, self.total, epochs)
        looks = (step - self._began + 1) % SPAN == 0
        if launched.is_known or not self.has_stepped or evaluates or saves or looks or is_last:
            self.settle()
        is_best = evaluates and self.evaluate()
        if saves or (is_best and self.best.is_kept):
            self.save(beside=not is_last)
        for line in newly_plain(self.assembly.model):
            self.progress.say(f"warning   step {step}: {line}")
        # Some rank was asked to, or cannot write: all of them stop after the same step.
        asked = self.interrupt.asked or self.saving.writer.has_failed or self.hooks.failure is not None
        is_asked_to_end = self.assembly.ranks.any(asked, self.assembly.place.device)
        if is_asked_to_end and not is_last:
            self.settle()
            self.save()  # raises what the writer has failed with
            stopped = f"stopped after step {step}; go on with --resume (saved in {self.folder.path})"
            self.hooks.raise_failure(stopped)
            raise Interrupted(stopped)

    def settle(self) -> None:
        """Wait for the step that the device is at, and log it: weights and `step` are of one moment. Raises
        NonFinite."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        try:
            result = unread.launched.result()
        except NonFinite:
            self._unread = unread  # whose rows are told
            raise
        # What the first update made is read back once, before anything is logged or saved; a skipped step has made no
        # optimizer states.
        if not (result.skipped or self.has_stepped) and self._seen is not None:
            self.has_stepped = True
            first = replace(self._seen, began=self._began, number=unread.step)
            for reading in verify_first_step(self.assembly, first):
                self.progress.say(f"after step {self.step + 1}: {reading.key} = {reading.found} ({reading.source})")
        self.step = unread.step
        self._log(result, unread)

    def _log(self, result: StepResult, unread: _Unread) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        speed = result.tokens / seconds
        values: dict[str, float | None] = {
            "step": self.step,
            "epoch": unread.epoch,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            self.assembly.objective.unit.replace(" ", "_"): result.terms,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "peak_allocated_bytes": unread.allocated,
            "peak_reserved_bytes": unread.reserved,
            "padding_share": unread.padding,
        }
        values |= planned_series(self.config, self.plan, result.tokens, seconds)
        if self._moved_elements is not None and (self.step - self._began + 1) % SPAN == 0:
            # The shares of elements that changed, said when they are tiny. No part of a step's time.
            moved = self._moved_elements.look()
            if line := caution(moved, self.config):
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
            values["grad_norm"] = None  # infinity is no number in JSON
            again = f"step {self.step}: float16 gradients overflowed, weights kept, loss scale {values['loss_scale']:g}"
            self.progress.say(again)
        self.note(values)
        self.progress.step(self.step, result.loss, result.learning_rate, speed, unread.allocated)
        if self.hooks.on_step is not None:
            self.hooks.call(self.hooks.on_step, {**values})
            self._clock = time.perf_counter()

    def evaluate(self) -> bool:
        """Mean loss over the held-out rows, if there are any, into metrics, trackers and the progress line. Whether
        it is the best so far."""
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

    def save(self, beside: bool = False, is_last: bool = False) -> None:
        """A checkpoint of the step just made, as `Saving.save` has it. Raises SaveFailed."""
        self.saving.save(beside, is_last)
        self._clock = time.perf_counter()

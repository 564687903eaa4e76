"""Everything one run holds while it trains, and what happens around each step."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from transformers import set_seed

from framework.build.allocator import choose_allocator
from framework.build.assembly import Assembly, assemble
from framework.build.batches import MicroBatch, eval_batches, rows_and_tokens
from framework.build.compiled import newly_plain
from framework.build.documents import document_lengths, on_device
from framework.build.given import NOTHING, Given
from framework.build.loss import Batch
from framework.build.place import Place, real_place
from framework.build.verify import (
    FirstStep,
    Reading,
    missing_gradients,
    verify,
    verify_emptied_cache,
    verify_first_step,
)
from framework.errors import (
    BrokenRows,
    DoesNotFit,
    Interrupted,
    NonFinite,
    RequestError,
    TunesmithError,
    VerificationFailed,
)
from framework.memory.explain.causes import Repair
from framework.memory.ledger import Plan
from framework.run.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from framework.run.comparison import compare
from framework.run.evaluate import evaluate, in_words
from framework.run.forecast import Forecast
from framework.run.inputs import Inputs, read_inputs
from framework.run.interrupt import Interrupt, watched_interrupt
from framework.run.meter import Meter
from framework.run.moved import SPAN, MovedElements, caution
from framework.run.out_of_memory import Watch, explained_failures, recorded_memory
from framework.run.progress import ProgressLine
from framework.run.record import RunFolder, clear, environment, make, open_folder
from framework.run.resume import check_resume
from framework.run.room import require_room, too_large
from framework.run.step import StepResult
from framework.run.survive import EVAL, remembered, shrunk, tries
from framework.run.trackers import check_trackers, flattened
from framework.run.training_batches import TrainingBatches, stream_state, total_steps, training_batches
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig

Planner = Callable[[TrainingConfig], Forecast]
"""What predicts a run before it is loaded; `run.forecast.forecast_in_subprocess` is the product's."""
LAST_SECONDS = 10.0
"""How long a run that is done waits for what the levers would have saved: small models are rehearsed by then."""


@dataclass
class Session:
    """One run between its first and its last step. `step` is the last optimizer step that was made."""

    config: TrainingConfig
    folder: RunFolder
    inputs: Inputs
    assembly: Assembly
    readings: tuple[Reading, ...]
    batches: TrainingBatches
    accelerator: Accelerator
    progress: ProgressLine
    meter: Meter
    forecast: Forecast | None
    watch: Watch
    planner: Planner | None = None
    step: int = 0
    saved: int = -1
    repairs: list[Repair] = field(default_factory=list)
    interrupt: Interrupt = field(default_factory=Interrupt)
    evals: list[dict[str, float]] = field(default_factory=list)
    _clock: float = 0.0
    _seen: FirstStep | None = None
    _eval_shapes: list[tuple[int, int]] = field(default_factory=list)
    has_stepped: bool = False
    """Whether this process has changed weights."""
    _moved_elements: MovedElements | None = None
    _stream: Iterator[list[MicroBatch]] | None = None
    _began: int = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.step + 1

    @property
    def plan(self) -> Plan | None:
        """What was predicted."""
        return self.forecast.plan if self.forecast is not None else None

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        return self.assembly.schedule.total

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trackers, progress bar and the watch for Ctrl-C, for as long as steps are made."""
        training = self.config.training
        if training.trackers:
            project = training.run_name or self.folder.path.name
            self.accelerator.init_trackers(project, config=flattened(self.config.model_dump(mode="json")))
        explained = explained_failures(self.watch, self.forecast, self.folder.path)
        with explained, recorded_memory(self.assembly.place), self.progress, watched_interrupt() as self.interrupt:
            try:
                yield
            except BrokenRows:
                if self.step:
                    self.save()
                raise
            except NonFinite as error:
                raise NonFinite(f"{error} Training rows of this step: {self.batches.rows_of(self.step)}.") from None
        self.accelerator.end_training()

    def start(self) -> None:
        """What comes right before the first step: the loss that training has to beat."""
        if self.step == 0:
            self.evaluate()
        self._moved_elements = MovedElements(self.assembly.trained)
        self._clock = time.perf_counter()

    def close(self, after: float = 0.0) -> None:
        """End what still goes on beside the run, `after` so many seconds at the latest."""
        if self.forecast is not None:
            self.forecast.stop(after)

    def take(self, step: int) -> list[Batch]:
        """The micro batches of an optimizer step, on the device. Call it for one step after the other."""
        if self._stream is None:
            self._stream = self.batches.start(step - 1)
        try:
            made = next(self._stream)
        except RequestError as error:
            kept = f"the state after step {step - 1} is saved" if step > 1 else "no step was made"
            raise BrokenRows(f"the rows of step {step} cannot be had; {kept}\n{error}") from None
        self.watch.begin(step, [batch["input_ids"].numel() for batch in made])
        if not self.has_stepped:
            self._seen = self._look(made)
        return [self._moved(batch) for batch in made]

    def rows_in_hand(self) -> Sequence[int | str]:
        """Numbers of the training rows in the micro batch at work, of a stream where they stand; none between two."""
        at, micro_batch = self.watch.step, self.watch.micro_batch
        shares = self.batches.shares_of(at - 1) if at is not None else []
        return shares[micro_batch - 1] if 0 < micro_batch <= len(shares) else []

    def shrink(self, repair: Repair) -> None:
        """Go on with a smaller size: the same rows a step in the same order, cut into more micro batches."""
        self.repairs.append(repair)
        self.config = shrunk(self.config, repair)
        self.assembly = replace(self.assembly, config=self.config)
        self.batches, self._stream = replace(self.batches, batch=self.config.batch), None
        self.meter.forget_steps()
        self.folder.write_config(self.config)
        self.progress.say(f"out of memory, undone and made again: {repair}; batch {self.config.batch}")

    def plan_again(self) -> None:
        """Predict the run at the size that it has shrunk to."""
        if self.forecast is None or self.planner is None:
            return
        self.forecast.stop()
        with contextlib.suppress(TunesmithError):
            self.forecast = self.planner(self.config)
            self.keep_forecast()

    def write_memory(self) -> dict[str, Any]:
        """`memory.json`: what was predicted next to what was measured, so far."""
        document = compare(self.plan, self.meter.document())
        document |= {"repairs": [repair.to_json() for repair in self.repairs], **self.watch.document()}
        self.folder.write_json("memory.json", document)
        return document

    def keep_forecast(self) -> None:
        """Store the plan in the run folder, now and whenever more is known."""
        if self.forecast is not None:
            self.forecast.keep(partial(self.folder.write_json, "plan.json"))

    def _look(self, made: Sequence[Batch]) -> FirstStep:
        """What a step is given, read while it is on the host."""
        return FirstStep(
            tuple(rows_and_tokens(self.config, batch) for batch in made),
            tuple(self._eval_shapes),
            documents=tuple(map(document_lengths, made)),
            joined=all("position_ids" in batch for batch in made),
            has_reference=all("reference" in batch for batch in made),
        )

    def _moved(self, batch: Batch) -> Batch:
        return on_device(self.assembly.place.device, batch)

    def observe(self, phase: str) -> None:
        """Meter each phase; before the first update, every trained tensor must have a gradient."""
        self.watch.observe(phase)
        if phase == "optimizer_step" and self.saved == -1:
            self.saved = 0
            absent = missing_gradients(self.assembly)
            if absent:
                raise VerificationFailed(
                    f"{len(absent)} trained tensors got no gradient from the first backward pass, first {absent[0]}"
                )

    def after_step(self, step: int, result: StepResult) -> None:
        """Log, evaluate, save; leave when the user has asked to. Raises Interrupted, after saving."""
        if not result.skipped:  # a skipped step has made no optimizer states
            self._verify_first_step(step)
        self._verify_emptied_cache(step)
        self.step, training = step, self.config.training
        if (growth := self.watch.end()) is not None:
            self.progress.say(f"warning   step {step}: {growth}")
        self._log(result)
        if training.eval_steps and step % training.eval_steps == 0 and step < self.total:
            self.evaluate()
        if training.save_steps and step % training.save_steps == 0:
            self.save()
        for line in newly_plain(self.assembly.model):
            self.progress.say(f"warning   step {step}: {line}")
        if self.interrupt.asked and step < self.total:
            self.save()
            raise Interrupted(f"stopped after step {step}; go on with --resume (saved in {self.folder.path})")

    def _verify_emptied_cache(self, step: int) -> None:
        """Read back that the cache was emptied, when it first was due. Raises VerificationFailed."""
        due = self.assembly.cache.steps
        if due is not None and step % due == 0 and step - self._began < due:
            for reading in verify_emptied_cache(self.assembly, self._began, step):
                self.progress.say(f"after step {step}: {reading.key} = {reading.found} ({reading.source})")

    def _verify_first_step(self, step: int) -> None:
        """Read back, once, what the first update made. Raises VerificationFailed before anything is logged or saved."""
        if not self.has_stepped and self._seen is not None:
            self.has_stepped = True
            first = replace(self._seen, began=self._began, number=step)
            for reading in verify_first_step(self.assembly, first):
                self.progress.say(f"after step {self.step + 1}: {reading.key} = {reading.found} ({reading.source})")

    def _log(self, result: StepResult) -> None:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        speed = result.tokens / seconds
        values: dict[str, float | None] = {
            "step": self.step,
            "epoch": round(self.batches.epochs(self.step), 4),
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            self.assembly.objective.unit.replace(" ", "_"): result.terms,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "peak_allocated_bytes": self.meter.allocated,
            "peak_reserved_bytes": self.meter.reserved,
        }
        if self._moved_elements is not None and (self.step - self._began + 1) % SPAN == 0:
            values |= self._look_at_moved(self._moved_elements)
        if self.config.training.on_oom is OnOutOfMemory.SHRINK:
            values["per_device_train_batch_size"] = self.config.batch.per_device
        scale = self.assembly.loss_scale
        if scale.enabled:
            values |= {"loss_scale": scale.scaler.get_scale(), "skipped_steps": scale.skipped}
        if result.skipped:
            values["grad_norm"] = None  # infinity is no number in JSON
            again = f"step {self.step}: float16 gradients overflowed, weights kept, loss scale {values['loss_scale']:g}"
            self.progress.say(again)
        self.folder.append_metrics(values)
        self.accelerator.log({name: value for name, value in values.items() if value is not None}, step=self.step)
        self.progress.step(self.step, result.loss, result.learning_rate, speed, self.meter.allocated)

    def _look_at_moved(self, elements: MovedElements) -> dict[str, float | None]:
        """The shares of elements that changed, for the metrics; said when they are tiny. No part of a step's time."""
        moved = elements.look()
        if line := caution(moved, self.config):
            self.progress.say(f"{line} (step {self.step})")
        self._clock = time.perf_counter()
        return {"changed_share": moved.all, "changed_share_vectors": moved.vectors}

    def evaluate(self) -> None:
        """Mean loss over the held-out rows, if there are any, into metrics, trackers and the progress line."""
        if self.inputs.data.eval is None:
            return
        for attempt in tries(self, EVAL):
            with attempt:
                values = self._evaluated()
        self.evals.append({"step": self.step, **values})
        self.folder.append_metrics(self.evals[-1])
        self.accelerator.log(values, step=self.step)
        self.progress.say(f"step {self.step}/{self.total}  {in_words(values)}")
        self._clock = time.perf_counter()

    def _evaluated(self) -> dict[str, float]:
        assert self.inputs.data.eval is not None
        self._eval_shapes.clear()
        data, size = self.config.data, int(self.config.training.per_device_eval_batch_size)
        pad, joined = self.batches.pad_token_id, data.padding_free
        made = eval_batches(self.inputs.data.eval, size, pad, padding_free=joined, multiple=data.padded(1))
        return evaluate(self.assembly, (self._moved(self._noted(batch)) for batch in made), self.meter.observe)

    def _noted(self, batch: Batch) -> Batch:
        self._eval_shapes.append(rows_and_tokens(self.config, batch))
        return batch

    def save(self) -> None:
        """A checkpoint of the step just made, unless it is there already."""
        if self.saved != self.step:
            self.meter.observe("save")
            limit = self.config.training.save_total_limit
            save_checkpoint(
                self.folder.path, self.assembly, self.step, limit, self.repairs, stream_state(self.batches, self.step)
            )
            self.saved = self.step
            self._clock = time.perf_counter()


def open_session(
    config: TrainingConfig,
    name: str,
    *,
    resume: bool,
    overwrite: bool,
    allow: Sequence[str],
    quiet: bool,
    planner: Planner | None,
    given: Given = NOTHING,
) -> Session:
    """Read, plan, assemble and verify what a config asks for; nothing is written before all of it stands.

    Raises RequestError for what cannot be done, DoesNotFit when the plan is over the card, VerificationFailed for an
    option that is not in effect, OutOfMemory. Close the session when it is done with.
    """
    check_trackers(config)
    transformers.utils.logging.disable_progress_bar()  # ours is the one bar
    inputs, forecast = _read_and_plan(config, planner, given)
    try:
        fits = forecast is None or forecast.plan.fits
        if forecast is not None and not fits and config.training.on_oom is not OnOutOfMemory.SHRINK:
            raise DoesNotFit(f"{too_large(forecast.plan)} `tunesmith plan` shows every term; nothing was loaded.")
        session = _build(inputs, forecast, name, resume, overwrite, allow, quiet)
        session.planner = planner
        if forecast is not None and not fits:
            session.progress.say(f"warning   {too_large(forecast.plan)} training.on_oom=shrink tries it nevertheless")
        return session
    except BaseException:
        if forecast is not None:
            forecast.stop()
        raise


def _read_and_plan(config: TrainingConfig, planner: Planner | None, given: Given) -> tuple[Inputs, Forecast | None]:
    """The rows, and the plan, which a process of its own makes in the meantime."""
    if config.training.task.is_of_rows and not config.data.labels:  # the head is as large as the rows have classes
        inputs = read_inputs(config, given)
        return inputs, planner(inputs.config) if planner is not None else None
    with ThreadPoolExecutor(1) as beside:
        planned = beside.submit(planner, config) if planner is not None else None
        try:
            inputs = read_inputs(config, given)
        except BaseException:
            if planned is not None and planned.exception() is None:
                planned.result().stop()
            raise
        return inputs, planned.result() if planned is not None else None


def _build(
    inputs: Inputs,
    forecast: Forecast | None,
    name: str,
    resume: bool,
    overwrite: bool,
    allow: Sequence[str],
    quiet: bool,
) -> Session:
    """The session around what was read and planned."""
    config = inputs.config
    folder = open_folder(config, name, resume, overwrite)
    if forecast is not None:
        require_room(forecast.plan, folder.path)
    newest = checkpoints(folder.path)[-1] if resume else None
    repairs, changes = list[Repair](), list[str]()
    if newest is not None:
        state = read_state(newest)
        config, repairs = remembered(config, state.get("repairs", []), allow)
        changes = [*map(str, repairs), *check_resume(state["config"], config, allow)]
    accelerator = _start_device(config, folder)
    place = real_place(accelerator.device)
    meter = Meter(place)
    set_seed(config.training.seed)
    batches = training_batches(config, inputs, read_state(newest) if newest is not None else None)
    watch = Watch(meter)
    with explained_failures(watch, forecast, None):
        assembly = assemble(config, inputs.architecture, place, total_steps(config, batches))
        meter.observe("end")  # what verifying runs is no part of loading
        readings = verify(assembly)
        _empty_cache(place)
        step = _resumed(newest, assembly, meter)
    progress = ProgressLine(assembly.schedule.total, step, config.training.logging_steps, quiet)
    for line in changes:
        progress.say(f"resumed with {line}")
    return Session(
        config,
        folder,
        inputs,
        assembly,
        readings,
        batches,
        accelerator,
        progress,
        meter,
        forecast,
        watch,
        step=step,
        saved=step if newest else -1,
        repairs=repairs,
    )


def _start_device(config: TrainingConfig, folder: RunFolder) -> Accelerator:
    """The device of this process, with the trackers; its allocator has its settings before anything is on it."""
    choose_allocator(config)
    return Accelerator(
        cpu=config.gpu.name == "cpu",
        log_with=[str(tracker) for tracker in config.training.trackers] or None,
        project_dir=str(folder.path),
    )


def _resumed(checkpoint: Path | None, assembly: Assembly, meter: Meter) -> int:
    """The last step of the checkpoint that was loaded, 0 without one."""
    if checkpoint is None:
        return 0
    meter.observe("resume")
    step = load_checkpoint(checkpoint, assembly)
    _empty_cache(assembly.place)
    return step


def _empty_cache(place: Place) -> None:
    """Give back what a load left unused: what comes next starts from what is held, as it was planned."""
    if place.kind == "cuda":
        torch.cuda.empty_cache()


def begin(session: Session, overwrite: bool) -> None:
    """Write the files that say what is about to run. The first thing that changes the run folder."""
    make(session.folder)
    if overwrite:
        clear(session.folder)
    if session.step:
        session.folder.forget_metrics_after(session.step)
    else:
        session.folder.write_config(session.config)
    device: dict[str, Any] = {"device": str(session.assembly.place.device), "torch_threads": torch.get_num_threads()}
    session.folder.write_json("environment.json", {**environment(), **device})
    if session.config.batch != session.inputs.config.batch:
        session.plan_again()  # what was planned is not the size that this run had shrunk to
    else:
        session.keep_forecast()

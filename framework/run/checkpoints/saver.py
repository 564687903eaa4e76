"""Saving of a run's checkpoints: begun after a step, possibly completed during later ones."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from framework.build.assembly import Assembly
from framework.errors import SaveFailed
from framework.memory.explain.causes import Repair
from framework.run.best import FILE, Best
from framework.run.checkpoints.async_writer import Writer
from framework.run.checkpoints.checkpoint import Contents, contents_of, empty_parts, save_checkpoint, tried_parts
from framework.run.checkpoints.export import try_export
from framework.run.hooks import Hooks
from framework.run.inputs import Inputs, TrainingBatches, stream_state
from framework.run.planning.capacity import available_host_bytes
from framework.run.ranks.coordinator import Coordinator
from framework.run.record.layout import checkpoint_name, step_of
from framework.run.record.meter import Meter
from framework.run.record.progress import ProgressLine
from framework.run.record.run_folder import RunFolder
from framework.run.rehearsal.footprint import state_tensors
from framework.run.state import dumped, trained_state
from framework.schema.config import TrainingConfig


class SavedRun(Protocol):
    """The parts of a run that a save reads."""

    config: TrainingConfig
    folder: RunFolder
    inputs: Inputs
    assembly: Assembly
    batches: TrainingBatches
    progress: ProgressLine
    meter: Meter
    coordinator: Coordinator
    step: int
    read: dict[str, Any]
    repairs: list[Repair]
    hooks: Hooks
    best: Best

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        ...


class Saving:
    """Saves one checkpoint at a time, on the main rank or as shards on all ranks. `saved` is the step of the last."""

    def __init__(self, session: SavedRun) -> None:
        self._session = session
        self.saved = session.step
        self.writer = Writer(session.config.training.async_save, session.assembly.ranks.world == 1)
        self._begun: int | None = None
        self._common = CommonSave(session.folder.path, session.coordinator, fallback=session.folder.fallback)
        self._split: Contents | None = None
        """Sharded contents that are being written."""
        self._printed = set[str]()

    def create_group(self) -> None:
        """Create the process group for sharded writing during training, if needed; every rank must call this."""
        if self._session.assembly.is_in_parts and self.writer.is_async:
            from framework.run.checkpoints.sharded import writers_group

            self._common = replace(self._common, group=writers_group())

    def attempt(self) -> str | None:
        """Test saving and exporting before the first step. Returns a description for sharded weights."""
        return self._common.attempt(self._session.assembly, self._session.inputs.tokenizer)

    def save(self, in_background: bool = False, is_last: bool = False) -> None:
        """Save a checkpoint of the last step, unless there is one. It is complete on return; `in_background` (with
        `training.async_save`) only at the next call; with `is_last`, after which no tensor may be changed, when
        `finish` returns. Raises SaveFailed, also for the previous checkpoint."""
        self.finish()
        is_overlapped = is_last and self._can_overlap()
        if self.saved != self._session.step:
            self._begin(is_overlapped)
        if not is_overlapped and not (in_background and self.writer.is_async):
            self.finish()

    def _can_overlap(self) -> bool:
        """Whether the last checkpoint can be written during the final evaluation and export: neither may swap in
        averaged weights or load the best ones, and host memory and disk must have room for the state and what is
        exported (`HostUse.end_bytes` of a plan)."""
        assembly = self._session.assembly
        is_changed = assembly.config.training.exports_average or self._session.best.is_kept
        if assembly.ranks.world > 1 or is_changed:
            return False
        held = (*trained_state(assembly.model).values(), *state_tensors(assembly))
        exported = assembly.model.parameters() if assembly.adapter is None else ()
        room = min(available_host_bytes(), shutil.disk_usage(self._session.folder.path).free)
        return room > 2 * max(sum(tensor.nbytes for tensor in held), sum(tensor.nbytes for tensor in exported))

    def save_first(self) -> None:
        """Save a checkpoint before the first step. Raises SaveFailed."""
        self._begin(is_last=False)
        self.finish()

    def note_best(self) -> None:
        """Name the best checkpoint in `best.json` once it is complete. Raises SaveFailed."""
        best, folder = self._session.best, self._session.folder
        if best.is_kept and best.step == self.saved:
            folder.write_json(FILE, {**best.to_json(), "checkpoint": checkpoint_name(self.saved)})

    def newest(self) -> int:
        """Step of the newest complete checkpoint, after the current write has ended; 0 without any. Usable by a failed
        rank, since it does not wait for the others."""
        self.writer.settle()
        found = self._session.folder.newest()
        return step_of(found) if found is not None else 0

    def _begin(self, is_last: bool) -> None:
        session = self._session
        session.meter.observe("save")
        with session.coordinator.phase(f"saving step {session.step}"):
            others = random_states_of_others(session.coordinator, session.step)
            if session.assembly.is_in_parts or session.assembly.ranks.is_main:
                stream = stream_state(session.batches, session.step)
                contents = contents_of(session.assembly, session.step, session.repairs, stream, others, session.read)
                contents = replace(contents, document={**contents.document, "best": session.best.to_json()})
                live = (*session.assembly.trained, *state_tensors(session.assembly))
                write = partial(self._write, parts=self._common.empty_parts(contents), at_once=is_last)
                self.writer.begin(contents, write, live, is_last)
        if self.writer.count == 1 and not is_last:
            session.progress.say(f"after step {session.step}: {self.writer.reading}")
        self._begun = session.step

    def finish(self) -> None:
        """Wait on all ranks, outside of any collective, until the current checkpoint is complete. Raises SaveFailed."""
        if self._begun is not None:
            coordinator = self._session.coordinator
            with coordinator.phase(f"writing the checkpoint of step {self._begun}"):
                failure = coordinator.shared(f"saved/{self._begun}", self._failure)
                if failure and self._split is not None and self._session.folder.fallback is not None:
                    failure = self._again(failure)
                self._split = None
            begun, self._begun = self._begun, None
            if failure:
                raise SaveFailed(failure)
            self.writer.wait()
            self.saved = begun
            self.note_best()
            self._session.hooks.call(self._session.hooks.on_save, self._session.folder.newest())
            if self.saved == self._session.total:
                self.writer.copies.clear()

    def _write(self, contents: Contents, parts: Path | None, at_once: bool) -> None:
        session = self._session
        if parts is not None:
            self._split = contents
            self._common.write_parts(contents, parts)
        if session.assembly.ranks.is_main:
            folder, fallback = (
                parts.parent.parent if parts is not None else session.folder.path,
                session.folder.fallback,
            )
            try:
                self._save_in(contents, folder, parts, at_once)
            except SaveFailed as error:
                if fallback is None or parts is not None:  # shards are written again by all ranks
                    raise
                try:
                    saved = self._save_in(contents, fallback, None)
                except SaveFailed as second:
                    raise SaveFailed(f"{error}\n{second}") from second
                session.progress.say(f"warning   {error} The checkpoint is {saved}")

    def _save_in(self, contents: Contents, folder: Path, parts: Path | None, at_once: bool = False) -> Path:
        keep, best = self._session.config.training.save_total_limit, self._session.best
        kept = best.step if best.is_kept else None
        return save_checkpoint(folder, contents, keep, parts, self._say_once, kept, at_once)

    def _again(self, failure: str) -> str:
        """Write a failed sharded checkpoint again into the fallback. Returns why that failed too; every rank must call
        this."""
        contents = self._split
        assert contents is not None
        self._failure()  # clears this rank's failure, which the main one has reported

        def save(fallback: Path, parts: Path) -> str:
            saved = self._save_in(contents, fallback, parts)
            self._session.progress.say(f"warning   {failure} The checkpoint is {saved}")
            return ""

        second = self._common.write_again(contents, save)
        return f"{failure}\n{second}" if second else ""

    def _say_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._session.progress.say(text)

    def _failure(self) -> str:
        """Wait for the current checkpoint. Returns why it could not be written; empty if it was."""
        try:
            self.writer.wait()
        except SaveFailed as error:
            return str(error)
        return ""


_FAILED = "failed: "
"""Prefix of a failure's reason in the main rank's answer to the others."""


@dataclass(frozen=True)
class CommonSave:
    """Sharded saving by all ranks. `group` is the process group for writing during training; `fallback` another run
    folder for when this one cannot be written."""

    folder: Path
    coordinator: Coordinator
    group: Any = None
    fallback: Path | None = None

    def empty_parts(self, contents: Contents) -> Path | None:
        """Create the folder for all ranks' shards; None if the contents are not sharded."""
        if not contents.is_split:
            return None
        return Path(self.coordinator.shared(f"parts/{contents.step}", partial(empty_parts, self.folder, self.fallback)))

    def write_again(self, contents: Contents, save: Callable[[Path, Path], str]) -> str:
        """Write all shards again into the fallback, where `save` then completes the checkpoint. Returns on every rank
        why that failed; empty if it did not."""

        def attempt(make: Callable[[], str]) -> str:
            try:
                return make()
            except SaveFailed as error:
                return f"{_FAILED}{error}"

        fallback = self.fallback
        assert fallback is not None, "without a fallback there is nowhere to write"
        made = self.coordinator.shared(
            f"parts elsewhere/{contents.step}", lambda: attempt(lambda: empty_parts(fallback))
        )
        if made.startswith(_FAILED):
            return made.removeprefix(_FAILED)
        try:
            self.write_parts(contents, Path(made))
        except SaveFailed as error:  # on every rank
            return str(error)
        saved = self.coordinator.shared(
            f"saved elsewhere/{contents.step}", lambda: attempt(lambda: save(fallback, Path(made)))
        )
        return saved.removeprefix(_FAILED) if saved.startswith(_FAILED) else ""

    def write_parts(self, contents: Contents, parts: Path) -> None:
        """Write this rank's shards."""
        from framework.run.checkpoints.sharded import write_parts  # torch's part of it takes seconds to import

        write_parts(parts, contents.tensors, self.group)

    def attempt(self, assembly: Assembly, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Test an export and, for sharded weights, a checkpoint before training, so that a save that cannot work fails
        now; everything written is deleted. Returns a description of the second, None if weights are not sharded."""
        with self.coordinator.phase("trying to export"):
            self.coordinator.shared("tried exporting", partial(try_export, assembly, tokenizer, self.folder / "final"))
        if not assembly.is_in_parts:
            return None
        began = time.perf_counter()
        with self.coordinator.phase("trying to save"):
            contents = contents_of(assembly, 0)
            if parts := self.empty_parts(contents):
                self.write_parts(contents, parts)
                self.coordinator.shared("tried saving", partial(tried_parts, parts, contents.tensors))
        done = "every rank has written its shards" if parts else "rank 0 has gathered all weights"
        return f"{done}, in {time.perf_counter() - began:.1f} s"


def random_states_of_others(coordinator: Coordinator, step: int) -> list[str]:
    """Random states of ranks 1, 2, ... for a checkpoint."""
    return coordinator.gathered(f"random/{step}", dumped())[1:] if coordinator.ranks.world > 1 else []

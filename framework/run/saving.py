"""The checkpoints of a run, from the step that they are of until they are complete."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from framework.run.checkpoint import Contents, checkpoints, contents_of, save_checkpoint
from framework.run.common_save import CommonSave
from framework.run.footprint import state_tensors
from framework.run.together import random_states_of_others
from framework.run.training_batches import stream_state
from framework.run.writer import Writer

if TYPE_CHECKING:
    from framework.run.session import Session


class Saving:
    """One checkpoint at a time: the main rank writes, or all ranks their parts. `saved` is the step of the last."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.saved = session.step
        self.writer = Writer(session.config.training.async_save, session.assembly.ranks.world == 1)
        self._begun: int | None = None
        self._common = CommonSave(session.folder.path, session.crew)

    def meet(self) -> None:
        """All ranks make the group in which they write beside training, where they do."""
        if self._session.assembly.is_in_parts and self.writer.beside:
            from framework.run.parts import writers_group

            self._common = replace(self._common, group=writers_group())

    def attempt(self) -> str | None:
        """Try before the first step what a save does; in words what that was, where sharded weights were part of it."""
        return self._common.attempt(self._session.assembly, self._session.inputs.tokenizer)

    def save(self, beside: bool = False) -> None:
        """A checkpoint of the step just made, unless it is there already. It is complete when this returns; with
        `beside`, where that was asked for, when this is called again. Raises SaveFailed, also of the one before."""
        self._finish()
        if self.saved != self._session.step:
            self._begin()
        if not beside or not self.writer.beside:
            self._finish()

    def newest(self) -> int:
        """The step of the newest complete checkpoint, when what is being written is there; 0 without any. For a rank
        that has failed: it does not wait for the others."""
        self.writer.settle()
        found = checkpoints(self._session.folder.path)
        return max((int(folder.name.removeprefix("step-")) for folder in found), default=0)

    def _begin(self) -> None:
        session = self._session
        session.meter.observe("save")
        with session.crew.phase(f"saving step {session.step}"):
            others = random_states_of_others(session.crew, session.step)
            if session.assembly.is_in_parts or session.assembly.ranks.is_main:
                stream = stream_state(session.batches, session.step)
                contents = contents_of(session.assembly, session.step, session.repairs, stream, others, session.read)
                live = (*session.assembly.trained, *state_tensors(session.assembly))
                self.writer.begin(contents, partial(self._write, parts=self._common.empty_parts(contents)), live)
        if self.writer.count == 1:
            session.progress.say(f"after step {session.step}: {self.writer.reading}")
        self._begun = session.step

    def _finish(self) -> None:
        """All ranks wait until the checkpoint that was begun is complete, outside of any collective."""
        if self._begun is not None:
            crew = self._session.crew
            with crew.phase(f"writing the checkpoint of step {self._begun}"):
                self.writer.wait()
                crew.shared(f"saved/{self._begun}", lambda: "saved")
            self.saved, self._begun = self._begun, None
            if self.saved == self._session.total:
                self.writer.copies.clear()

    def _write(self, contents: Contents, parts: Path | None) -> None:
        session = self._session
        if parts is not None:
            self._common.write_parts(contents, parts)
        if session.assembly.ranks.is_main:
            save_checkpoint(session.folder.path, contents, session.config.training.save_total_limit, parts)

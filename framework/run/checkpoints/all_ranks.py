"""What all ranks do for a save, and the trial of it before the first step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from framework.build.assembly import Assembly
from framework.errors import SaveFailed
from framework.run.checkpoints.checkpoint import Contents, contents_of, empty_parts, tried_parts
from framework.run.checkpoints.export import try_export
from framework.run.ranks.coordinator import Coordinator
from framework.run.rng import dumped

_FAILED = "failed: "
"""Before the reason, in what the main rank tells the others of what it has tried."""


@dataclass(frozen=True)
class CommonSave:
    """Where ranks meet that each write a part. `group`: in which of torch's, where they write during training.
    `fallback`: another folder, for what does not go into this one."""

    folder: Path
    coordinator: Coordinator
    group: Any = None
    fallback: Path | None = None

    def empty_parts(self, contents: Contents) -> Path | None:
        """The folder that all ranks write their parts into, where each has one."""
        if not contents.is_split:
            return None
        return Path(self.coordinator.shared(f"parts/{contents.step}", partial(empty_parts, self.folder, self.fallback)))

    def write_again(self, contents: Contents, save: Callable[[Path, Path], str]) -> str:
        """All parts once more, into the fallback, of which `save` then makes a checkpoint there. Returns why that
        failed, on every rank; empty where it did not."""

        def attempt(make: Callable[[], str]) -> str:
            try:
                return make()
            except SaveFailed as error:
                return f"{_FAILED}{error}"

        fallback = self.fallback
        assert fallback is not None, "else there is no place for them"
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
        """This rank's part."""
        from framework.run.checkpoints.sharded import write_parts  # torch's part of it takes seconds to import

        write_parts(parts, contents.tensors, self.group)

    def attempt(self, assembly: Assembly, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """What is small of the export is written, sharded weights are gathered, or written and read back, and all is
        thrown away before anything is trained on: a save that cannot work fails now. In words what was done of
        the second."""
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
        done = "every rank has written its part" if parts else "rank 0 has gathered all weights"
        return f"{done}, in {time.perf_counter() - began:.1f} s"


def random_states_of_others(coordinator: Coordinator, step: int) -> list[str]:
    """For a checkpoint, the states of the generators of ranks 1, 2, ..."""
    return coordinator.gathered(f"random/{step}", dumped())[1:] if coordinator.ranks.world > 1 else []

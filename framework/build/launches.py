"""Launches of the package's own kernels, which a rehearsal notes in place of making them."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from framework.memory.trace import Launcher


class Note(Protocol):
    """Told the name of a kernel, the bytes that one launch of it reads and writes, who launches it, and how many
    tensors it updates."""

    def __call__(self, name: str, moved: int, launcher: Launcher, tensors: int) -> None: ...


_notes: list[Note] = []


@contextlib.contextmanager
def listening(note: Note) -> Iterator[None]:
    """Within the block, `note` is told of each launch that a rehearsal would make."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def note_launch(name: str, moved: int, launcher: Launcher = Launcher.TRITON, tensors: int = 1) -> None:
    """Tell whoever listens of a launch that moves `moved` bytes and updates so many tensors."""
    for note in _notes:
        note(name, moved, launcher, tensors)

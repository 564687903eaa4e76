"""Launches of the package's own kernels, which a rehearsal records instead of running them."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from framework.memory.trace import Launcher


class Note(Protocol):
    """Callback with the name of a kernel, the bytes that one launch reads and writes, its launcher, and the number of
    tensors it updates."""

    def __call__(self, name: str, moved: int, launcher: Launcher, tensors: int) -> None: ...


_notes: list[Note] = []


@contextlib.contextmanager
def listening(note: Note) -> Iterator[None]:
    """Within the block, call `note` for each launch of a rehearsal."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def note_launch(name: str, moved: int, launcher: Launcher = Launcher.TRITON, tensors: int = 1) -> None:
    """Report a launch that moves `moved` bytes and updates `tensors` tensors to all listeners."""
    for note in _notes:
        note(name, moved, launcher, tensors)

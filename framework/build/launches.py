"""Launches of the package's own kernels, which a rehearsal notes in place of making them."""

import contextlib
from collections.abc import Callable, Iterator

Note = Callable[[str, int], None]
"""Told the name of a kernel and the bytes that one launch of it reads and writes."""

_notes: list[Note] = []


@contextlib.contextmanager
def listening(note: Note) -> Iterator[None]:
    """Within the block, `note` is told of each launch that a rehearsal would make."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def note_launch(name: str, moved: int) -> None:
    """Tell whoever listens of a launch that moves `moved` bytes."""
    for note in _notes:
        note(name, moved)

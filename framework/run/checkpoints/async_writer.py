"""Checkpoints that are written during training (`training.async_save`): from copies in host memory, by a thread.

All of a state is copied before the next step begins, so that no step changes what is written. The copies' memory is
kept from one save to the next: it is not asked for anew, and its pages are there. A thread suffices, since writing,
checksums and the flush to disk do not hold Python's lock.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
from torch import Tensor

from framework.build.ranks import local_part
from framework.errors import VerificationFailed
from framework.memory.units import size
from framework.run.checkpoints.checkpoint import Contents
from framework.schema.plural import counted

KEY = "training.async_save"
PATIENCE = 60.0
"""Seconds that a rank which has failed waits for its writer: another rank may be gone, for which that would wait."""


@dataclass
class Writer:
    """Writes one checkpoint at a time: `beside` training, or before `begin` returns.

    `copying`, `waiting` and `writing` are the seconds that training stood still for copies and for the writer, and that
    the writer took.
    """

    beside: bool
    is_alone: bool = True
    copies: dict[str, Tensor] = field(default_factory=dict)
    reading: str = ""
    """What the last checkpoint was found to be written from."""
    count: int = 0
    copying: float = 0.0
    waiting: float = 0.0
    writing: float = 0.0
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def begin(
        self, contents: Contents, write: Callable[[Contents], None], live: Iterable[Tensor], is_last: bool = False
    ) -> None:
        """Write `contents`; `wait` first for what was begun before, and afterwards for what `write` raises. `beside`,
        raises VerificationFailed where what is written shares memory with `live` tensors, which training changes.
        With `is_last` training is over: nothing changes the tensors before `wait`, and none of them is copied."""
        if not self.beside and not is_last:
            self._write(contents, write)
            return
        if self.beside:
            began = time.perf_counter()
            contents = self._copied(contents)
            self.copying += time.perf_counter() - began
            # Read back that no step can change what is written.
            own = {_address(tensor) for tensor in live if local_part(tensor).numel()}
            shared = [name for name, tensor in contents.tensors.items() if _address(tensor) in own]
            if shared:
                raise VerificationFailed(f"{KEY}: training would change {shared[0]} while it is written")
            total = sum(local_part(tensor).nbytes for tensor in contents.tensors.values())
            self.reading = f"{KEY} = true ({size(total)} of copies in host memory)"
            self.count += 1
        self._thread = threading.Thread(target=self._write, args=(contents, write), daemon=True, name="writer")
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise."""
        return self._error is not None

    def wait(self, seconds: float | None = None) -> None:
        """Until what was begun is written, or for so many seconds. Raises what has gone wrong there."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join(seconds)
            self.waiting += time.perf_counter() - began
            self._thread = self._thread if self._thread.is_alive() else None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def settle(self) -> None:
        """Wait without raising, after something else has gone wrong."""
        with contextlib.suppress(Exception):
            self.wait(None if self.is_alone else PATIENCE)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was begun is finished, but for a second Ctrl-C."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            self.settle()

    def __str__(self) -> str:
        saves = f"{counted(self.count, 'checkpoint')} written during training in {self.writing:.1f} s"
        return f"{saves}; training waited {self.copying:.1f} s for copies, {self.waiting:.1f} s for the writer"

    def _write(self, contents: Contents, write: Callable[[Contents], None]) -> None:
        began = time.perf_counter()
        try:
            write(contents)
        except BaseException as error:  # told by who waits
            self._error = error
        self.writing += time.perf_counter() - began

    @torch.no_grad()
    def _copied(self, contents: Contents) -> Contents:
        """The same in memory that training does not touch."""
        if contents.is_separate:
            return contents
        self.copies = {name: copy for name, copy in self.copies.items() if name in contents.tensors}
        for name, tensor in contents.tensors.items():
            copy = self.copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                self.copies[name] = tensor.detach().to("cpu", copy=True)
            else:
                local_part(copy).copy_(local_part(tensor))
        return replace(contents, tensors=dict(self.copies), is_separate=True)


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()

"""Asynchronous checkpoint writer (`training.async_save`): a thread writes from copies in host memory.

The whole state is copied before the next step begins, so that no step changes what is written. The copies' memory is
reused from one save to the next. A thread suffices, since writing, checksums and the flush to disk release the GIL.
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
"""Seconds that a failed rank waits for its writer, which may itself wait for a rank that no longer exists."""


@dataclass
class Writer:
    """Writes one checkpoint at a time, during training if `is_async`, otherwise before `begin` returns.

    `copying` and `waiting` are the seconds that training was stopped for copies and for the writer; `writing` is the
    writer's own time.
    """

    is_async: bool
    is_alone: bool = True
    copies: dict[str, Tensor] = field(default_factory=dict)
    reading: str = ""
    """Verification line: the memory that the last checkpoint was written from."""
    count: int = 0
    copying: float = 0.0
    waiting: float = 0.0
    writing: float = 0.0
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def begin(
        self, contents: Contents, write: Callable[[Contents], None], live: Iterable[Tensor], is_last: bool = False
    ) -> None:
        """Start to write `contents`, after waiting for the previous write; the next `wait` raises what `write` raises.
        With `is_async`, raises VerificationFailed if the copies share memory with `live` tensors, which training
        changes. With `is_last` training is over, so the tensors cannot change before `wait` and are not copied."""
        if not self.is_async and not is_last:
            self._write(contents, write)
            return
        if self.is_async:
            began = time.perf_counter()
            contents = self._copied(contents)
            self.copying += time.perf_counter() - began
            # Verify that no step can change what is written.
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
        """Wait until the current write has finished, or at most `seconds`. Raises its error."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join(seconds)
            self.waiting += time.perf_counter() - began
            self._thread = self._thread if self._thread.is_alive() else None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def settle(self) -> None:
        """Wait without raising, for use after another failure."""
        with contextlib.suppress(Exception):
            self.wait(None if self.is_alone else PATIENCE)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the current write, unless interrupted by a second Ctrl-C."""
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
        except BaseException as error:  # raised by `wait`
            self._error = error
        self.writing += time.perf_counter() - began

    @torch.no_grad()
    def _copied(self, contents: Contents) -> Contents:
        """Copy the contents into memory that training does not touch."""
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

"""Triton kernel launches in a rehearsal: recorded with the bytes that they would move, not executed.

The buffers that a kernel reads and writes are torch's, so the tracker sees them. Only a plan of a run with such kernels
imports this module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from framework.run.rehearsal.kernels import count_bytes

NOTE = "Liger's kernels are timed by the bytes that they move, and on the host as launches from Python"
_WRITES_OVER: Mapping[str, tuple[int, ...]] = {
    "_triton_rope": (0, 2),
    "_triton_llama4_rope": (0, 1),
    "_swiglu_backward_kernel": (1, 2),
    "_swiglu_backward_kernel_tiled": (1, 2),
    "_geglu_tanh_backward_kernel": (1, 2),
}
"""Kernel of liger-kernel -> positions of the arguments that it reads and then writes, which are moved twice."""


@contextlib.contextmanager
def noted_launches(note: Callable[[str, int], None]) -> Iterator[None]:
    """Let `kernel[grid](...)` within the block call `note(name, bytes moved)` and leave its tensors unchanged."""
    launch = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            name = str(getattr(kernel, "__name__", "triton"))
            again = [args[index] for index in _WRITES_OVER.get(name, ())]
            with torch._C.DisableTorchFunction():
                tensors = [item for item in (*args, *again, *kwargs.values()) if isinstance(item, torch.Tensor)]
                note(name, sum(count_bytes(tensor) for tensor in tensors))

        return run

    KernelInterface.__getitem__ = noted
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch

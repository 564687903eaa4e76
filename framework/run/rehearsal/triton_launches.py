"""Launches of Triton kernels in a rehearsal: nothing is launched, and what each call would move is noted.

The buffers that a kernel reads and writes are torch's, so that the tracker sees them anyway. Only a plan of a run with
such kernels imports this module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from framework.run.rehearsal.kernels import count_bytes

SAID = "Liger's kernels take the time that their tensors need to cross the bus, and the host that of a launch by Python"
_WRITES_OVER: Mapping[str, tuple[int, ...]] = {
    "_triton_rope": (0, 2),
    "_triton_llama4_rope": (0, 1),
    "_swiglu_backward_kernel": (1, 2),
    "_swiglu_backward_kernel_tiled": (1, 2),
    "_geglu_tanh_backward_kernel": (1, 2),
}
"""Kernel of liger-kernel -> positions of the arguments that it reads and then writes: they cross the bus twice."""


@contextlib.contextmanager
def noted_launches(note: Callable[[str, int], None]) -> Iterator[None]:
    """Within the block, `kernel[grid](...)` calls `note(name, bytes moved)` and leaves its tensors as they are."""
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

"""Host memory that CUDA pins: a failure there is named as what it is, not as a fault of the card."""

import contextlib
import traceback
from collections.abc import Iterator

import torch


def could_not_pin(size: int, reason: str) -> str:
    """The failure in words, which `tunesmith explain` knows too."""
    return f"could not pin {size / 2**30:.2f} GiB of host memory ({reason})"


@contextlib.contextmanager
def pinning(size: int) -> Iterator[None]:
    """Within the block `size` bytes of host memory are pinned, by torch. What CUDA says when it cannot ("invalid
    argument", "out of memory") sounds like the card's. Raises RuntimeError that says so; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_of_card = isinstance(error, torch.OutOfMemoryError)
        if is_of_card or "pin_memory" not in f"{last.name} {last.line}":
            raise
        raise RuntimeError(could_not_pin(size, str(error).partition("\n")[0])) from error

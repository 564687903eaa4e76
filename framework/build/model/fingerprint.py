"""A number that depends on every bit of some weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from framework.build.ranks import local_part

_PIECE = 1 << 24
"""Elements summed at once, since a sum of integers takes 8 bytes for each."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number of 64 bits that depends on every bit of the tensors, in their order; of split ones, of this part."""
    found = 0
    for tensor in tensors:
        whole = local_part(tensor.detach()).contiguous().flatten()
        bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
        pieces = (bits[start : start + _PIECE] for start in range(0, len(bits), _PIECE))
        sums = [piece.sum(dtype=torch.int64) for piece in pieces]
        for total in torch.stack(sums).tolist() if sums else ():
            found = (found * 1_000_003 + total) % 2**64
    return found

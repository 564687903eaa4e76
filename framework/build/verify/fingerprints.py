"""Whether weights are bit for bit what they were: of what a task measures the trained model against."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.ranks import local_part
from framework.build.tasks import WithoutAdapter, reference_of

_PIECE = 1 << 24
"""Elements summed at once, since a sum of integers takes 8 bytes for each."""


@dataclass(frozen=True)
class Fingerprints:
    """Of what is measured against, and of what is trained, before training."""

    fixed: int
    trained: int


def take_fingerprints(assembly: Assembly) -> Fingerprints | None:
    """None for a task that measures against no weights."""
    fixed = _fixed(assembly)
    return Fingerprints(fingerprint(fixed), fingerprint(assembly.trained)) if fixed else None


def fixed_fingerprint(assembly: Assembly) -> int | None:
    """Of what is measured against; None where nothing is, and of split weights, of which no rank has all."""
    fixed = _fixed(assembly) if assembly.sharding is None else []
    return fingerprint(fixed) if fixed else None


def _fixed(assembly: Assembly) -> list[Tensor]:
    if assembly.companion is not None:
        return list(assembly.companion.parameters())
    if isinstance(reference_of(assembly.objective), WithoutAdapter):
        return [parameter for parameter in assembly.model.parameters() if not parameter.requires_grad]
    return []


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

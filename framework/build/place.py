"""Where a run is assembled: on a real device, or on tensors without storage that stand for one."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Place:
    """`device` holds the tensors; `kind` is the device whose rules the run follows.

    A rehearsal has `device=meta` and, when it stands for a CUDA card, `kind="cuda"`.
    """

    device: torch.device
    kind: Literal["cpu", "cuda"]

    @property
    def rehearsed(self) -> bool:
        return self.device.type == "meta"


def real_place(device: torch.device) -> Place:
    """The place of a run on `device`."""
    return Place(device, "cuda" if device.type == "cuda" else "cpu")


def rehearsal_place(kind: Literal["cpu", "cuda"]) -> Place:
    """A place without storage that follows the rules of `kind`."""
    return Place(torch.device("meta"), kind)

"""Devices of an assembly, real or simulated on meta tensors; and torch dtypes by name."""

from dataclasses import dataclass
from typing import Literal

import torch

from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.training import TrainingParams


@dataclass(frozen=True)
class Place:
    """Where an assembly lives: `device` holds the tensors, `kind` is the device type whose rules apply.

    A rehearsal has `device=meta` and, for a CUDA card, `kind="cuda"`.
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
    """The place of a rehearsal with the rules of `kind`."""
    return Place(torch.device("meta"), kind)


TORCH_DTYPES = {
    TorchDtype.FLOAT32: torch.float32,
    TorchDtype.BFLOAT16: torch.bfloat16,
    TorchDtype.FLOAT16: torch.float16,
}
AUTOCAST_DTYPES = {MixedPrecision.BF16: torch.bfloat16, MixedPrecision.FP16: torch.float16}


def autocast_dtype(training: TrainingParams) -> torch.dtype | None:
    """The dtype of autocast, None without."""
    return AUTOCAST_DTYPES.get(MixedPrecision(training.mixed_precision_dtype or "none"))

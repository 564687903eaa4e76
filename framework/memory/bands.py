"""Uncertainty of a plan's memory, by classes of runs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Band(StrEnum):
    """Class of a prediction's uncertainty."""

    PLAIN = "plain"
    LOW_BIT_OPTIMIZER = "low_bit_optimizer"
    COMPILED = "compiled"
    MATHEMATICAL = "mathematical_attention"
    INT8_BASE = "int8_base"
    CONVOLUTION = "convolution"
    SHARDED = "sharded"
    CONTEXT = "context"
    TENSOR = "tensor"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class Uncertainty:
    """Allowance for under-prediction: shares of the allocated and of the cached bytes, and a constant."""

    allocated: float
    reserved: float
    constant: int
    source: str

    def upper(self, allocated: int, reserved: int, others: int) -> int:
        """Upper bound of device bytes. `others` are context and managed memory."""
        cached = max(allocated * (1 + self.allocated), reserved * (1 + self.reserved))
        return int(cached) + others + self.constant


_MIB = 1 << 20
UNCERTAINTY: Mapping[Band, Uncertainty] = {
    Band.PLAIN: Uncertainty(
        0.01,
        0.036,
        16 * _MIB,
        "280 rows on an H100 and an H200, torch 2.11: allocated -0.2 %, reserved -1.9 % at worst; 2026-11",
    ),
    Band.LOW_BIT_OPTIMIZER: Uncertainty(
        0.01, 0.15, 106 * _MIB, "5 rows on an H100: reserved -13.9 % at worst, managed -90 MiB at worst; 2026-11"
    ),
    Band.COMPILED: Uncertainty(
        0.03,
        0.07,
        64 * _MIB,
        "24 rows on an H100 and an H200: allocated -64 MiB (-8.3 %), reserved -72 MiB (-9.9 %) of a small and "
        "-8.4 % of a larger one at worst; a whole planned by block -2.5 %; 2026-11",
    ),
    Band.MATHEMATICAL: Uncertainty(
        0.01, 0.065, 16 * _MIB, "7 rows on an H100 and an H200: reserved -5.7 % (Falcon) and -3.4 % at worst; 2026-11"
    ),
    Band.INT8_BASE: Uncertainty(
        0.06,
        0.075,
        16 * _MIB,
        "1 row on an H200, random weights (LLM.int8): allocated -5.1 %, reserved -5.9 %; 2026-11",
    ),
    Band.CONVOLUTION: Uncertainty(
        0.11,
        0.18,
        128 * _MIB,
        "2 rows on an H200, workspace of cuDNN is not planned: allocated -9.5 %, reserved -14.2 % at worst; 2026-11",
    ),
    Band.SHARDED: Uncertainty(
        0.01, 0.065, 16 * _MIB, "22 rows on two H200, torch 2.11: allocated -0.01 %, reserved -5.1 % at worst; 2026-11"
    ),
    Band.CONTEXT: Uncertainty(
        0.01, 0.065, 128 * _MIB, "4 rows on two H200, torch 2.11: allocated -0.01 %, reserved -1.9 % at worst; 2026-11"
    ),
    Band.TENSOR: Uncertainty(
        0.01, 0.065, 128 * _MIB, "4 rows on two H200, torch 2.11: allocated 0.00 %, reserved -4.0 % at worst; 2026-11"
    ),
    Band.UNMEASURED: Uncertainty(0.03, 0.06, 128 * _MIB, "no row of such a card yet: twice the band of the H100"),
}
"""The allowance by class. Its source names the measurements that it covers; a card that was not measured gets more."""

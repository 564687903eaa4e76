"""Counter-based random numbers, so that a resumed run draws the same ones without stored generator states."""

import torch
from torch import Tensor


def mixed(seed: int, step: int, number: int) -> int:
    """A 31-bit seed for (run, step, parameter), by the finalizer of MurmurHash3."""
    value = (seed * 0x9E3779B1 + step * 0x85EBCA77 + number * 0xC2B2AE3D) & 0xFFFFFFFF
    value = ((value ^ value >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ value >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return (value ^ value >> 16) & 0x7FFFFFFF


SPREAD, FACTORS = 0x9E3779B1, (0x7FEB352D, 0x846CA68B)
"""Constants of `random_bits`: the golden ratio, and the factors of the integer hash `lowbias32` (Wellons,
hash-prospector, 2018). It takes 16 operations an element, Philox some 80, so a kernel that draws for each element stays
memory-bound."""


def random_bits(seed: int, begin: int, end: int, device: torch.device) -> Tensor:
    """32 random bits, int32, for each of the elements `begin` to `end` of a tensor: a hash of (`seed`, element)."""
    at = torch.arange(begin, end, dtype=torch.int64, device=device)
    bits = at.mul_(SPREAD).add_(seed).to(torch.int32)  # the lower 32 bits
    del at
    bits.bitwise_xor_(bits >> 16 & 0xFFFF).mul_(_signed(FACTORS[0]))
    bits.bitwise_xor_(bits >> 15 & 0x1FFFF).mul_(_signed(FACTORS[1]))
    return bits.bitwise_xor_(bits >> 16 & 0xFFFF)


def _signed(factor: int) -> int:
    """The 32 bits as a signed int32."""
    return factor - (1 << 32) if factor >> 31 else factor

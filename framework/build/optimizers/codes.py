"""8-bit floats for optimizer states: one float32 scale for every 256 elements, rounded up or down at random.

A first moment has a sign, four bits of exponent and three of mantissa, a second moment five bits of exponent and three
of mantissa: both ranges (2^17 and 2^34) exceed the spread of a block's gradients, and neighbours differ by at most an
eighth. Rounding to nearest would freeze a second moment, which changes by a thousandth per step (beta2 0.999); random
rounding is unbiased on average. Numbers are encoded by their bits, so that kernels need no table: a float32 whose
exponent is shifted to the code's range has the code in its upper bits, subnormals too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale, as in bitsandbytes' blockwise 8-bit optimizers: 2.03 bytes of states a parameter."""
SMALLEST = 4096
"""Minimum elements of a parameter with coded states; smaller ones, norms and biases, take little memory (as
bitsandbytes)."""
MANTISSA = 3
DROPPED = 23 - MANTISSA
"""Bits of a float32's mantissa that a code lacks; as many random bits are added before they are cut off."""
LARGEST = 2 - 2.0**-MANTISSA
"""Scaled value of the largest element of a block: the largest code's mantissa, with an exponent of zero."""
TINIEST_SCALE = 1e-30
"""Minimum scale, so that its reciprocal is finite; elements below it are negligible compared with Adam's epsilon."""


@dataclass(frozen=True)
class Code:
    """One of the two formats: its exponent bits, and whether it has a sign."""

    exponent: int
    signed: bool

    @property
    def shift(self) -> float:
        """The factor from the code's own float32, whose exponent begins at -127, to numbers up to LARGEST."""
        return float(2.0 ** (127 - (2**self.exponent - 1)))

    @property
    def largest(self) -> int:
        """The largest code, without the sign."""
        return int(2 ** (self.exponent + MANTISSA) - 1)


FIRST, SECOND = Code(exponent=4, signed=True), Code(exponent=5, signed=False)


def encode(code: Code, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 `values`, `[n]`: uint8 `[n]` and float32 `[ceil(n / BLOCK)]`.

    `noise`: int32 `[n]`, of which the lower DROPPED bits are used. A positive second moment never becomes 0, since
    an update is divided by its root.
    """
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) * (1 / LARGEST)).clamp_(min=TINIEST_SCALE)
    scaled = (blocks * (1 / scales)[:, None]).view(-1)[:count].mul_(1 / code.shift)
    magnitudes = (scaled.abs().view(torch.int32) + (noise & (1 << DROPPED) - 1)) >> DROPPED
    magnitudes = magnitudes.clamp_(max=code.largest)
    if code.signed:
        return (magnitudes | (scaled < 0).int() << 7).to(torch.uint8), scales
    return torch.maximum(magnitudes, (values > 0).int()).to(torch.uint8), scales


def decode(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    """float32 values of `codes`, uint8 `[n]`, with `scales`, float32 `[ceil(n / BLOCK)]`."""
    bits = codes.int()
    values = ((bits & code.largest) << DROPPED).view(torch.float32) * code.shift
    if code.signed:
        values = torch.where(bits > code.largest, -values, values)
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]

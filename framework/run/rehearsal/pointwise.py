"""Results of pointwise operators on meta tensors without torch's Python meta kernels, which take 30 times as long.

Only the case that a step is full of is answered: one floating-point tensor as large as the result, and numbers or
tensors of the same dtype next to it. The result then has that tensor's shape, dtype and order of dimensions
(TensorIterator.cpp: operands that are broadcast do not decide it). tests/run/rehearsal/test_pointwise.py compares with
torch.
"""

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_UNARY = frozenset({aten.neg.default, aten.rsqrt.default, aten.silu.default, aten.pow.Tensor_Scalar})
_BINARY = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
)


def pointwise_result(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """The result of `func(*args)`, or None when it is not of the plain case."""
    if func in _UNARY:
        return _like(args[0])
    if func not in _BINARY or len(args) != 2:
        return None
    left, right = args
    if not isinstance(right, torch.Tensor):
        return _like(left) if isinstance(right, int | float) else None
    if left.dtype != right.dtype or left.device != right.device:
        return None
    if _covers(left, right):
        return _like(left)
    return _like(right) if _covers(right, left) and sum(size > 1 for size in left.shape) < 2 else None


def _covers(large: torch.Tensor, small: torch.Tensor) -> bool:
    """Whether `small` is broadcast to the shape of `large`."""
    missing = large.dim() - small.dim()
    return missing >= 0 and all(
        size in (1, wanted) for size, wanted in zip(small.shape, large.shape[missing:], strict=True)
    )


def _like(tensor: torch.Tensor) -> torch.Tensor | None:
    """An empty tensor of this shape, dtype and order of dimensions; an expanded tensor has no order of its own."""
    strides = tensor.stride()
    if tensor.device.type != "meta" or not tensor.is_floating_point() or 0 in strides:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if extent != tensor.numel():
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")

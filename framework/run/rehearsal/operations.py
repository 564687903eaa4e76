"""What one call of an operator is to the model of time: products, bytes, dtype, shape; and results of pointwise ones.

Torch's Python meta kernels take 30 times as long as `pointwise_result`, which answers the case that a step is full of:
one floating-point tensor as large as the result, and numbers or tensors of the same dtype next to it. The result then
has that tensor's shape, dtype and order of dimensions (TensorIterator.cpp: operands that are broadcast do not decide
it). tests/run/rehearsal/test_pointwise.py compares with torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from framework.memory.trace import WAIT, Launcher, Operation
from framework.run.rehearsal import kernels
from framework.run.rehearsal.kernels import is_packed_product, packed_shape, unpacking

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


_DTYPE_NAMES: Mapping[torch.dtype | None, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float16: "float16",
}


def operations_of(
    phase: str,
    launcher: Launcher,
    packet: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[torch.Tensor],
) -> list[Operation]:
    """The operations that a call is on a card: one, or one for each group of a product that runs group by group."""
    operands = [*kernels.tensors_in(args), *(kernels.tensors_in(tuple(kwargs.values())) if kwargs else ())]
    multiplied = operands[1:] if packet is aten.addmm else operands  # what it adds to may be wider
    floating = next((tensor.dtype for tensor in multiplied if tensor.dtype.is_floating_point), None)
    is_of_lists = packet.__name__.startswith(("_foreach_", "_fused_")) and args and isinstance(args[0], list | tuple)
    operation = Operation(
        name=packet.__name__,
        phase=phase,
        flops=kernels.count_flops(packet, args, kwargs, results),
        bytes=kernels.count_moved(packet, args, [*operands, *results]),
        dtype=_DTYPE_NAMES.get(floating, ""),
        shape=kernels.product_shape(packet, args),
        launcher=launcher,
        tensors=(len(args[0]) if is_of_lists else 1),
        is_aligned=kernels.is_aligned(packet, args),
    )
    if str(packet).startswith("bitsandbytes."):
        operation = operation._replace(launcher=Launcher.BITSANDBYTES)
    if is_packed_product(packet):
        shape = packed_shape(packet, args)
        operation = operation._replace(shape=shape, flops=2 * math.prod(shape))
        written = unpacking(packet, args)
        if written:
            unpacked = operation._replace(name="unpack", flops=0, bytes=operation.bytes + written, shape=())
            return [unpacked, operation._replace(bytes=operation.bytes + written, launcher=launcher)]
    if packet is aten._grouped_mm and floating is not torch.bfloat16 and args[2] is not None:
        groups = args[2].shape[0]  # one product after the other
        operation = operation._replace(flops=operation.flops // groups, bytes=operation.bytes // groups)
        wait = Operation(WAIT, phase, 0, 0, "")  # the host reads where the groups end
        return [wait, *[operation] * groups]
    return [operation]

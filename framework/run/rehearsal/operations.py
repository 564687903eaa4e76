"""Operator calls as operations of the time model (products, bytes, dtype, shape), and fast results of frequent calls.

Torch's Python meta kernels take 30 times as long as `plain_result`, which handles the most frequent cases: pointwise
calls with one floating-point tensor as large as the result, and numbers or other tensors (the result has that tensor's
shape and order of dimensions, TensorIterator.cpp: broadcast operands do not determine it); products of matrices; joined
tensors; sums and means of contiguous tensors; zeros like another tensor; and foreach updates in place, which return
nothing.
tests/run/rehearsal/test_pointwise.py compares with torch.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from framework.memory.trace import WAIT, Launcher, Operation
from framework.run.rehearsal import kernels
from framework.run.rehearsal.kernels import is_quantized_product, quantized_shape, unpacking

aten = torch.ops.aten
_UNARY = frozenset({aten.neg.default, aten.rsqrt.default, aten.silu.default, aten.pow.Tensor_Scalar})
_BINARY = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
)
_REDUCTIONS = frozenset({aten.mean.dim, aten.sum.dim_IntList})
_UPDATES = frozenset(
    getattr(getattr(aten, f"_foreach_{name}_"), overload)
    for name, overloads in {
        "lerp": ("Scalar",),
        "addcmul": ("Scalar", "ScalarList"),
        "addcdiv": ("Scalar", "ScalarList"),
        "add": ("Scalar", "List", "ScalarList"),
        "mul": ("Scalar", "List", "ScalarList", "Tensor"),
        "div": ("Scalar", "List", "ScalarList"),
    }.items()
    for overload in overloads
)
"""Foreach operators that update tensors in place without changing their size."""


def plain_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `func(*args, **kwargs)`, or None when it is not of the plain cases."""
    if func is aten.zeros_like.default:
        is_plain = not kwargs.keys() - {"memory_format", "pin_memory"} and not kwargs.get("pin_memory")
        return torch.empty_like(args[0], **kwargs) if is_plain and args[0].device.type == "meta" else None
    if kwargs:
        return None
    if func is aten._foreach_sqrt.default:
        found = list(map(_like, args[0]))
        return None if any(each is None for each in found) else found
    if func is aten.mm.default or func is aten.addmm.default:
        return _product(*args[-2:])
    if func is aten.cat.default:
        return _joined(*args)
    if func is aten.slice_backward.default:
        is_plain = args[0].device.type == "meta"
        return torch.empty(args[1], dtype=args[0].dtype, device="meta") if is_plain else None
    if func in _REDUCTIONS:
        return _reduced(*args)
    if func in _UNARY or (func in _BINARY and len(args) == 2 and isinstance(args[1], int | float)):
        return _like_expanded(args[0]) if 0 in args[0].stride() else _like(args[0])
    return _of_two(*args) if func in _BINARY and len(args) == 2 else None


def updates_list(func: Any, args: Sequence[Any]) -> bool:
    """Whether the call changes values of a list of tensors without storage, and so nothing."""
    return func in _UPDATES and bool(args[0]) and args[0][0].device.type == "meta"


def _reduced(tensor: torch.Tensor, dims: Sequence[int] | None = None, keeps: bool = False) -> torch.Tensor | None:
    """The sum or mean over `dims` of a contiguous floating-point tensor."""
    if not dims or tensor.device.type != "meta" or not tensor.is_floating_point() or not tensor.is_contiguous():
        return None
    gone = {dim % tensor.dim() for dim in dims}
    shape = [1 if index in gone else size for index, size in enumerate(tensor.shape) if keeps or index not in gone]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The product of two matrices of the same dtype; what is added to it changes nothing of its shape."""
    if left.dtype != right.dtype or left.dim() != 2 or left.device.type != "meta" or left.shape[1] != right.shape[0]:
        return None
    return torch.empty((left.shape[0], right.shape[1]), dtype=left.dtype, device="meta")


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Several tensors of one dtype next to each other, in the plain order of dimensions. Images have another one."""
    first, dims = parts[0], parts[0].dim()
    is_plain = all(part.dtype == first.dtype and part.dim() == dims and part.device.type == "meta" for part in parts)
    is_image = dims in (4, 5) and any(part.stride(1) <= part.stride(-1) or part.stride(-1) != 1 for part in parts)
    if not is_plain or is_image or not dims:
        return None
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if any(len(part) == 0 for part in parts):
        return None
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _of_two(left: torch.Tensor, right: Any) -> torch.Tensor | None:
    if not isinstance(right, torch.Tensor) or left.device != right.device:
        return None
    if left.dtype != right.dtype:
        return _of_two_dtypes(left, right)
    if _covers(left, right):
        return _like(left)
    return _like(right) if _covers(right, left) and sum(size > 1 for size in left.shape) < 2 else None


def _of_two_dtypes(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The same of two floating-point tensors with dimensions, of which the left one has the shape of the result."""
    are_floating = left.is_floating_point() and right.is_floating_point() and left.dim() and right.dim()
    if not are_floating or not _covers(left, right) or (found := _like(left)) is None:
        return None
    dtype = torch.promote_types(left.dtype, right.dtype)
    return found if found.dtype == dtype else torch.empty_like(found, dtype=dtype)


def _covers(large: torch.Tensor, small: torch.Tensor) -> bool:
    """Whether `small` broadcasts to the shape of `large`."""
    missing = large.dim() - small.dim()
    return missing >= 0 and all(
        size in (1, wanted) for size, wanted in zip(small.shape, large.shape[missing:], strict=True)
    )


def _like(tensor: torch.Tensor) -> torch.Tensor | None:
    """An empty tensor of the same shape, dtype and order of dimensions; None for an expanded tensor, which has no
    order."""
    strides = tensor.stride()
    if tensor.device.type != "meta" or not tensor.is_floating_point() or 0 in strides:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if extent != tensor.numel():
        return torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _like_expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same of an expanded tensor alone: contiguous, where what is not expanded is in order."""
    rest = [stride for stride in tensor.stride() if stride]
    is_in_order = all(first > second for first, second in pairwise(rest)) and 1 not in tensor.shape
    if tensor.device.type != "meta" or not tensor.is_floating_point() or not rest or not is_in_order:
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


_DTYPE_NAMES: Mapping[torch.dtype | None, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float16: "float16",
}


_ALLOCATIONS = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})
"""Calls that launch nothing."""


def operations_of(
    phase: str,
    launcher: Launcher,
    packet: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[torch.Tensor],
) -> list[Operation]:
    """The operations of a call on a card: one, or one for each group of a product that runs group by group."""
    operands = [*kernels.tensors_in(args), *(kernels.tensors_in(tuple(kwargs.values())) if kwargs else ())]
    multiplied = operands[1:] if packet is aten.addmm else operands  # the addend may be wider
    floating = next((tensor.dtype for tensor in multiplied if tensor.dtype.is_floating_point), None)
    is_of_lists = packet.__name__.startswith(("_foreach_", "_fused_")) and args and isinstance(args[0], list | tuple)
    if packet in _ALLOCATIONS:
        return [Operation(packet.__name__, phase, 0, 0, "")]
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
        one_by_one=kernels.count_one_by_one(packet, operands, results),
    )
    if str(packet).startswith("bitsandbytes.") and launcher is Launcher.TORCH:
        operation = operation._replace(launcher=Launcher.BITSANDBYTES)
    if is_quantized_product(packet):
        shape = quantized_shape(packet, args)
        operation = operation._replace(shape=shape, flops=2 * math.prod(shape))
        written = unpacking(packet, args)
        if written:
            unpacked = operation._replace(name="unpack", flops=0, bytes=operation.bytes + written, shape=())
            return [unpacked, operation._replace(bytes=operation.bytes + written, launcher=launcher)]
    if packet is aten._grouped_mm and floating is not torch.bfloat16 and args[2] is not None:
        groups = args[2].shape[0]  # one product after the other
        shape = kernels.group_shape(args[0], args[1], groups)
        operation = operation._replace(flops=operation.flops // groups, bytes=operation.bytes // groups, shape=shape)
        wait = Operation(WAIT, phase, 0, 0, "")  # the host reads the ends of the groups
        return [wait, *[operation] * groups]
    return [operation]

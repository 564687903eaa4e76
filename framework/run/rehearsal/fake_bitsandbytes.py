"""What the operators of bitsandbytes do on a card, for tensors without storage.

A dispatch mode sees one operator where its CUDA kernel (bitsandbytes/backends/cuda/ops.py, 0.50) makes the plain weight
first: that is memory, and a matrix product. Nothing here needs the package.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def is_packed_product(packet: Any) -> bool:
    """Whether this operator multiplies with a packed weight."""
    return _name(packet) in ("gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")


def packed_shape(packet: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """(1, rows, columns, inner) of a product with a packed weight."""
    left = args[1] if _name(packet) == "int8_mixed_scaled_mm" else args[0]
    columns = args[2][0] if _name(packet) == "gemm_4bit" else _weight(packet, args).shape[0]
    return (1, left.numel() // left.shape[-1], int(columns), left.shape[-1])


def _weight(packet: Any, args: Sequence[Any]) -> torch.Tensor:
    weight: torch.Tensor = args[2] if _name(packet) == "int8_mixed_scaled_mm" else args[1]
    return weight


def unpacking(packet: Any, args: Sequence[Any]) -> int:
    """Bytes of the plain weight that a product with 4 bits writes before it multiplies with it."""
    return int(math.prod(args[2])) * args[0].element_size() if _name(packet) == "gemm_4bit" else 0


def packed_workspace(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Bytes of the buffers inside one call.

    4 bits: the whole weight in the dtype of the product, and the nested scales unpacked (_dequant_linear_fallback; up
    to 1,536 rows some cards have a kernel without them, but backward unpacks the weight in any case). 8 bits: the
    product in int32, and in float16 where another dtype is wanted.
    """
    name = _name(packet)
    if name == "gemm_4bit":
        scales = kwargs.get("absmax_8bit")
        rows, columns = args[2]
        unpacked = [4 * scales.numel()] * 2 if scales is not None else []
        return [*unpacked, rows * columns * args[0].element_size()]
    if name in ("int8_scaled_mm", "int8_mixed_scaled_mm"):
        _, rows, columns, _ = packed_shape(packet, args)
        dtype = kwargs.get("dtype") or (args[0].dtype if name == "int8_mixed_scaled_mm" else torch.float16)
        return [4 * rows * columns] + ([2 * rows * columns] if dtype != torch.float16 else [])
    if name == "int8_vectorwise_quant" and _threshold(args, kwargs):
        return [2 * args[0].numel(), args[0].numel()]  # absolute values and where they are too large
    return []


def packed_result(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result where bitsandbytes' own meta kernel does not know its size: as without outliers. Else None."""
    name = _name(packet)
    if name == "int8_vectorwise_quant" and _threshold(args, kwargs):
        rows = args[0]
        scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
        return torch.empty_like(rows, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)
    if name == "int8_mixed_scaled_mm":
        left, columns = args[0], args[2].shape[0]
        return left.new_empty((*args[1].shape[:-1], columns)), left.new_empty(0)
    return None


def _threshold(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("threshold", 0.0))


def _name(packet: Any) -> str:
    space, _, name = str(getattr(packet, "_qualified_op_name", "")).partition("::")
    return name if space == "bitsandbytes" else ""

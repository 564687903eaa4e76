"""Facts of single operators for the tracker: products, FLOPs, bytes, and kernels with hidden buffers.

For bitsandbytes a dispatch mode sees one operator, while the CUDA kernel (bitsandbytes/backends/cuda/ops.py, 0.50)
first dequantizes the weight: that is memory, and a matrix product. Nothing here needs the package.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from framework.memory import workspace as rules
from framework.memory.attention import FORWARD_WORKSPACE_CUDNN, Attention, Backend, backward_workspace
from framework.memory.cards import capability_of
from framework.run.rehearsal.fake_functions import HALF_DTYPES
from framework.schema.gpu import GPUParams

aten = torch.ops.aten
MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or result, including those in a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, list | tuple):
                yield from (inner for inner in item if isinstance(inner, torch.Tensor))


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel moves for `tensor`: its elements, but an expanded tensor's storage only once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def count_moved(packet: Any, args: Sequence[Any], operands: Sequence[torch.Tensor]) -> int:
    """Bytes that a call moves: each operand and result once. Our token-loss kernel reads the logits twice and
    overwrites them with their gradient."""
    moved = sum(map(count_bytes, operands))
    if packet.__name__ == "token_losses_" and args[5]:
        moved += 2 * count_bytes(args[0])
    return moved


def count_flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> int:
    """Floating-point operations: by our formula for attention, else by torch's (torch.utils.flop_counter), or 0.

    Causal attention over one sequence computes half of its scores.
    """
    if packet is aten._grouped_mm:
        rows, inner = args[0].shape[-2:]
        return int(2 * rows * inner * args[1].shape[-1])
    if packet is aten.addmm:
        args, kwargs = args[:3], {}  # torch's formula does not accept a result dtype
    formula = flop_registry.get(packet)
    if formula is None or not results:
        return 0
    if "scaled_dot_product" in str(packet):
        flops = _attention_flops(args, backward=str(packet).endswith("_backward"))
    else:
        out = results[0] if len(results) == 1 else tuple(results)
        flops = int(formula(*args, **kwargs, out_val=out))
    causal_at = _CAUSAL_ARGUMENT.get(packet)
    if causal_at is not None and len(args) > causal_at and args[causal_at] is True:
        return flops // 2
    return flops


def _attention_flops(args: Sequence[Any], backward: bool) -> int:
    """Two products of every query with every key forward, five backward; a group of query heads may share a key head.

    torch 2.11's own formula refuses such groups; 2.13's agrees with this one.
    """
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, tokens, width = query.shape
    products = 3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]
    return int(2 * batch * heads * tokens * key.shape[-2] * products)


def group_shape(left: torch.Tensor, right: torch.Tensor, groups: int) -> tuple[int, ...]:
    """(1, m, n, k) of one group's product on average: the groups share the rows of `left`, the columns of `right`, or,
    of two matrices, what is summed over."""
    (rows, inner), columns = left.shape[-2:], right.shape[-1]
    if left.dim() == right.dim():
        return (1, rows, columns, inner // groups)
    return (1, rows // groups, columns, inner) if left.dim() == 2 else (1, rows, columns // groups, inner)


def grouped_product(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any
) -> torch.Tensor | None:
    """The result of `_grouped_mm` for inputs that its meta kernel refuses but CUDA computes group by group; else None.

    left (rows, k) or (groups, rows, k), right (groups, k, columns) or (k, columns); two matrices give one product per
    group (the gradient of stacked weights).
    """
    if left.dtype == torch.bfloat16 or offsets is None:
        return None
    shape = (left.shape[-2], right.shape[-1])
    stacked = left.dim() == right.dim()
    return left.new_empty((offsets.shape[0], *shape) if stacked else shape)


def is_aligned(packet: Any, args: Sequence[Any]) -> bool:
    """Whether the matrices of a product have an even number of elements from one row (or column) to the next."""
    if packet not in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
        return True
    left, right = args[:2] if packet in (aten.mm, aten.bmm) else args[1:3]
    steps = (max(matrix.stride()[-2:]) for matrix in (left, right))
    return right.shape[-1] % 2 == 0 and all(step % 2 == 0 for step in steps)


@functools.cache
def _is_elementwise(packet: Any) -> bool:
    tagged = any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())
    return tagged or packet in (aten._to_copy, aten.copy_, aten.masked_fill_)


def count_one_by_one(packet: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    """Elements of an elementwise call whose kernel does not load vectors of them, else 0.

    TensorIterator merges all dimensions into one if all tensors are dense and equal in shape and strides; else the
    kernel computes the offset of each element, and with several dtypes it casts each (ATen/native/cuda/CUDALoops.cuh).
    Float32 to half precision has vectors all the same (Copy.cu). Numbers are no tensors there.
    """
    if not results or not _is_elementwise(packet):
        return 0
    result = results[0]
    tensors = [tensor for tensor in operands if tensor.dim() or tensor.device.type == "meta"]
    alike = all(
        tensor.shape == result.shape and (tensor.stride() == result.stride() or _steps(tensor) == _steps(result))
        for tensor in tensors
    )
    dtypes = {tensor.dtype for tensor in (*tensors, result) if tensor.dtype.is_floating_point}
    is_cast = len(dtypes) > 1 and (packet not in (aten._to_copy, aten.copy_) or result.dtype not in HALF_DTYPES)
    return 0 if alike and _is_dense(result) and not is_cast else result.numel()


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions with more than one element, which are the ones that matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(extent == tensor.numel() or not tensor.numel())


def product_shape(packet: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """(batch, m, n, k) of a matrix product, (batch x heads, queries, keys, head width) of attention, else ()."""
    if "scaled_dot_product" in packet.__name__:
        query, key = args[1:3] if packet.__name__.endswith("_backward") else args[:2]
        batch, heads, queries, width = query.shape
        return (batch * heads, queries, key.shape[-2], width)
    if packet is aten.mm or packet is aten.bmm:
        left, right = args[0], args[1]
    elif packet is aten.addmm or packet is aten.baddbmm:
        left, right = args[1], args[2]
    else:
        return ()
    batch = left.shape[0] if left.dim() == 3 else 1
    return (batch, left.shape[-2], right.shape[-1], left.shape[-1])


def workspace(packet: Any, args: Sequence[Any], card: GPUParams, dtype: torch.dtype | None = None) -> list[int]:
    """Bytes of the buffers that this operator's kernel on `card` allocates and frees inside one call. `dtype` is the
    call's argument of this name."""
    if packet is aten.sum:
        return _sum_workspace(args, card, dtype)
    if packet is aten._softmax_backward_data:
        return [args[1].numel() * args[1].element_size()] if card.capability else []  # `grad * output` in SoftMax.cu
    if packet in (aten.convolution, aten.convolution_backward):
        # On the CPU oneDNN copies the first two operands into blocked layout (torch 2.13, x86, 2026-11): input and
        # weight in forward, gradient and input in backward. cuDNN's workspaces are not known beforehand.
        return [tensor.numel() * tensor.element_size() for tensor in args[:2]] if card.name == "cpu" else []
    rule = _WORKSPACES.get(packet)
    return [size for size in rule(args) if size > 0] if rule is not None else []


def _sum_workspace(args: Sequence[Any], card: GPUParams, dtype: torch.dtype | None) -> list[int]:
    """Buffers of a sum: only one over leading dimensions of contiguous memory keeps its work split over blocks. A sum
    in another dtype converts its input first, except half precision summed in float32 on a card (make_reduction in
    ReduceOpsUtils.h)."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    if not tensor.is_floating_point():
        return []
    is_widened = tensor.dtype in HALF_DTYPES and dtype == torch.float32 and card.name != "cpu"
    is_as_it_is = is_widened or dtype in (None, tensor.dtype)
    width = tensor.element_size() if is_as_it_is or dtype is None else dtype.itemsize
    converted = [] if is_as_it_is else [tensor.numel() * width]
    if not dims or card.multiprocessors is None or card.capability is None:
        return converted
    reduced = {dim % tensor.dim() for dim in dims}
    if tensor.dim() - 1 in reduced or not tensor.is_contiguous():
        return converted
    rows = math.prod(tensor.shape[dim] for dim in reduced)
    threads = rules.threads_per_multiprocessor(capability_of(card.capability))
    columns = tensor.numel() // rows
    return [*converted, *rules.column_sum(rows, columns, width, card.multiprocessors, threads)]


_CAUSAL_ARGUMENT: Mapping[Any, int] = {
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_cudnn_attention: 6,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_flash_attention_backward: 11,
    aten._scaled_dot_product_cudnn_attention_backward: 14,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}
"""Position of `is_causal` in each attention operator's schema."""


def describe_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    enable_gqa: bool,
) -> Attention:
    """The properties of an attention call that determine kernel and workspace."""
    batch, heads, queries, head_dim = query.shape
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=key.shape[1],
        queries=queries,
        keys=key.shape[2],
        head_dim=head_dim,
        value_dim=value.shape[-1],
        half_precision=query.dtype in HALF_DTYPES,
        bfloat16=query.dtype == torch.bfloat16,
        masked=mask is not None,
        causal=causal,
        dropout=dropout,
        requires_grad=any(tensor.requires_grad for tensor in (query, key, value)),
        broadcast=key.shape[1] != heads and not enable_gqa,
    )


def _attention_rule(backend: Backend) -> Callable[[Sequence[Any]], list[int]]:
    dropout_at = {Backend.FLASH: 10, Backend.CUDNN: 13, Backend.EFFICIENT: 9}[backend]

    def rule(args: Sequence[Any]) -> list[int]:
        causal_at = dropout_at + (2 if backend is Backend.EFFICIENT else 1)
        causal = bool(args[causal_at]) if len(args) > dropout_at + 2 else False
        query, key, value = args[1:4]
        call = describe_attention(query, key, value, None, float(args[dropout_at]), causal, True)
        return backward_workspace(backend, call)

    return rule


def _embedding_rule(args: Sequence[Any]) -> list[int]:
    gradient, indices, rows = args[0], args[1], args[2]
    return rules.embedding_backward(indices.numel(), rows, gradient.shape[-1])


def has_fused_bias(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a matrix product adds its bias in cuBLASLt (isInputCompliesAddmmCudaLt in cuda/Blas.cpp).

    A product with a 4-bit weight is one with the dequantized weight.
    """
    if _name(packet) == "gemm_4bit":
        return _argument(args, kwargs, 6, "bias") is not None
    return bool(packet is aten.addmm and args[0].dim() == 1 and min(args[2].shape) > 1)


_WORKSPACES: Mapping[Any, Callable[[Sequence[Any]], list[int]]] = {
    aten._scaled_dot_product_flash_attention_backward: _attention_rule(Backend.FLASH),
    aten._scaled_dot_product_cudnn_attention_backward: _attention_rule(Backend.CUDNN),
    aten._scaled_dot_product_efficient_attention_backward: _attention_rule(Backend.EFFICIENT),
    aten.embedding_dense_backward: _embedding_rule,
    aten._foreach_norm: lambda args: rules.foreach_norm([tensor.numel() for tensor in args[0]]),
    aten._scaled_dot_product_cudnn_attention: lambda args: [FORWARD_WORKSPACE_CUDNN],
    aten.logsumexp: lambda args: rules.logsumexp(
        args[0].numel(), args[0].numel() // args[0].shape[-1], args[0].element_size()
    ),
    aten._safe_softmax: lambda args: rules.safe_softmax(args[0].numel(), args[0].numel() // args[0].shape[-1]),
    aten.sort: lambda args: rules.sort(args[0].numel()),
}


def is_quantized_product(packet: Any) -> bool:
    """Whether this operator multiplies with a quantized weight."""
    return _name(packet) in ("gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")


def quantized_shape(packet: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """(1, rows, columns, inner) of a product with a quantized weight."""
    left, weight = args[1:3] if _name(packet) == "int8_mixed_scaled_mm" else args[:2]
    columns = args[2][0] if _name(packet) == "gemm_4bit" else weight.shape[0]
    return (1, left.numel() // left.shape[-1], int(columns), left.shape[-1])


def unpacking(packet: Any, args: Sequence[Any]) -> int:
    """Bytes of the dequantized weight that a 4-bit product writes before it multiplies."""
    return int(math.prod(args[2])) * args[0].element_size() if _name(packet) == "gemm_4bit" else 0


def quantized_workspace(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Bytes of the buffers inside one call.

    4 bits: the dequantized weight in the dtype of the product, and dequantized nested scales (_dequant_linear_fallback;
    up to 1,536 rows some cards have a kernel without them, but backward always dequantizes). 8 bits: the product in
    int32, and in float16 if another dtype is requested.
    """
    name = _name(packet)
    if name == "gemm_4bit":
        scales = _argument(args, kwargs, 7, "absmax_8bit")
        rows, columns = args[2]
        unpacked = [4 * scales.numel()] * 2 if scales is not None else []
        return [*unpacked, rows * columns * args[0].element_size()]
    if name in ("int8_scaled_mm", "int8_mixed_scaled_mm"):
        _, rows, columns, _ = quantized_shape(packet, args)
        dtype = kwargs.get("dtype") or (args[0].dtype if name == "int8_mixed_scaled_mm" else torch.float16)
        return [4 * rows * columns] + ([2 * rows * columns] if dtype != torch.float16 else [])
    if name == "int8_vectorwise_quant" and _threshold(args, kwargs):
        return [2 * args[0].numel(), args[0].numel()]  # absolute values, and a mask of those over the threshold
    return []


def quantized_result(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result if bitsandbytes' meta kernel does not know its size, assuming no outliers; else None."""
    name = _name(packet)
    if name == "int8_vectorwise_quant" and _threshold(args, kwargs):
        rows = args[0]
        scales = rows.new_empty(rows.numel() // rows.shape[-1], dtype=torch.float32)
        return torch.empty_like(rows, dtype=torch.int8), scales, rows.new_empty(0, dtype=torch.int64)
    if name == "int8_mixed_scaled_mm":
        left, columns = args[0], args[2].shape[0]
        return left.new_empty((*args[1].shape[:-1], columns)), left.new_empty(0)
    return None


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """An argument that the dispatcher passes by position although the caller named it, or None."""
    return args[position] if len(args) > position else kwargs.get(name)


def _threshold(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("threshold", 0.0))


@functools.cache
def _name(packet: Any) -> str:
    """The name of an operator of bitsandbytes', else empty."""
    space, _, name = str(getattr(packet, "_qualified_op_name", "")).partition("::")
    return name if space == "bitsandbytes" else ""

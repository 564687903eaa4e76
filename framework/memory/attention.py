"""Choice of the kernel of torch's scaled_dot_product_attention on a card, and that kernel's workspace.

The choice is a data-driven copy of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.11 to 2.13): without
the card torch would always take the math path, which needs different memory.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum

from framework.memory.cards import capability_of
from framework.schema.gpu import GPUParams


class Backend(StrEnum):
    """Kernels of scaled_dot_product_attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CPU_FLASH = "cpu_flash"
    MATH = "math"


@dataclass(frozen=True)
class Attention:
    """One attention call. `keys` and `queries` are sequence lengths, `element_bytes` the size of one element."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    half_precision: bool
    bfloat16: bool
    masked: bool
    causal: bool
    dropout: float
    requires_grad: bool
    broadcast: bool = False
    """Fewer key heads than query heads without `enable_gqa`, as Falcon calls it: no fused kernel broadcasts heads."""

    @property
    def same_head_dim(self) -> bool:
        return self.head_dim == self.value_dim


# cuDNN attention comes first on capability 9.0, 10.0 and 10.3 if cuDNN is newer than 9.15 (torch's CUDA 13 wheels ship
# 9.19), as measured on an H100 with torch 2.11+cu130 (calibration/h100_truth.jsonl).
_CUDNN_PREFERRED = ((9, 0), (10, 0), (10, 3))


ALL = frozenset({Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH})


def choose_backend(card: GPUParams, call: Attention, allowed: Container[Backend] = ALL) -> Backend | None:
    """The kernel that torch chooses for `call` on `card` among those `allowed`; None if none of them supports it."""
    for backend in _able(card, call):
        switch = Backend.FLASH if backend is Backend.CPU_FLASH else backend  # the CPU's flash kernel has CUDA's switch
        if switch in allowed:
            return backend
    return None


def _able(card: GPUParams, call: Attention) -> Iterator[Backend]:
    """Kernels that support `call`, in torch's order."""
    if call.broadcast:  # check_batch_size_and_num_heads_dense in sdp_utils_cpp.h
        yield Backend.MATH
    elif card.capability is None:
        # The CPU's flash kernel supports masks but no dropout (sdp_utils_cpp.cpp); ROCm's is AOTriton's, here as
        # CUDA's.
        if card.name == "cpu":
            if call.same_head_dim and not call.dropout and call.kv_heads == call.heads:
                yield Backend.CPU_FLASH
        else:
            if call.same_head_dim and call.half_precision and not call.masked and call.head_dim <= 256:
                yield Backend.FLASH
            yield Backend.EFFICIENT
        yield Backend.MATH
    else:
        capability = capability_of(card.capability)
        prefers_cudnn, cudnn_can = capability in _CUDNN_PREFERRED, _cudnn_can(capability, call)
        if prefers_cudnn and cudnn_can:
            yield Backend.CUDNN
        if _flash_can(capability, call):
            yield Backend.FLASH
        if _efficient_can(capability, call):
            yield Backend.EFFICIENT
        yield Backend.MATH
        if not prefers_cudnn and cudnn_can and capability >= (8, 0):
            yield Backend.CUDNN  # after `math`, which supports everything, so chosen only if it alone is allowed


def _cudnn_can(capability: tuple[int, int], call: Attention) -> bool:
    limit = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (call.head_dim, call.value_dim) == (192, 128):
        limit = 192
    return (
        (call.half_precision and (capability >= (8, 0) or not call.bfloat16))
        and max(call.head_dim, call.value_dim) <= limit
        and call.head_dim % 8 == 0
        and call.value_dim % 8 == 0
        and call.keys > 1
        and (call.queries > 1 or not call.dropout)
    )


def _flash_can(capability: tuple[int, int], call: Attention) -> bool:
    if not ((8, 0) <= capability <= (12, 1)) or not call.half_precision or not call.same_head_dim:
        return False
    if call.masked or call.head_dim > 256 or (call.causal and call.queries != call.keys):
        return False
    narrow = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    refused = 192 < call.head_dim <= 224 or (call.head_dim > 224 and call.dropout > 0)
    return not (narrow and call.requires_grad and refused)


def _efficient_can(capability: tuple[int, int], call: Attention) -> bool:
    if call.bfloat16 and capability < (8, 0):
        return False
    if call.kv_heads != call.heads:
        return False  # check_batch_size_and_num_heads_dense: this kernel does not group queries
    alignment = 8 if call.half_precision else (4 if capability >= (8, 0) else 1)
    return call.head_dim % alignment == 0 and call.value_dim % alignment == 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


FORWARD_WORKSPACE_CUDNN = 256
"""Workspace of cuDNN's forward graph, the same for every call (probe_attention.py)."""


def backward_workspace(backend: Backend, call: Attention) -> list[int]:
    """Bytes that the backward kernel allocates in addition to its results, one entry per buffer.

    Every formula is exact for the calls of benchmarks/probe_attention.py (H100, torch 2.11, cuDNN 9.19, bfloat16).
    flash: mha_bwd in flash_api.cpp (softmax_d and dq_accum in fp32; keys and values expanded for grouped queries).
    efficient: mem_eff_attention backward (`delta`, and one fp32 accumulator of dQ per block of queries with its lock;
    wider heads than 128 accumulate dK and dV too). cudnn: one graph workspace of an fp32 dQ, one fp32 number per row,
    and a dK and dV per query head for grouped queries; dropout and masks add nothing.
    """
    rows = call.batch * call.heads * call.queries
    expanded = call.batch * call.heads * call.keys * call.head_dim * (2 if call.half_precision else 4)
    grouped = call.kv_heads != call.heads
    if backend is Backend.FLASH:
        lines = call.batch * call.heads * _round_up(call.queries, 128)
        width = _round_up(call.head_dim, 32 if call.head_dim <= 128 else 64)
        return [4 * lines, 4 * lines * width] + ([expanded, expanded] if grouped else [])
    if backend is Backend.CUDNN:
        return [4 * rows * call.head_dim + 4 * rows + (2 * expanded if grouped else 0) + FORWARD_WORKSPACE_CUDNN]
    if backend is Backend.EFFICIENT:
        delta = [4 * rows]
        if not call.half_precision:
            return delta
        heads, block = call.batch * call.heads, 64 if call.head_dim <= 64 else 128
        blocks = heads * -(-call.queries // block)
        accumulated = blocks * (16 + 4 * block * _round_up(call.head_dim, 32))
        if call.head_dim > 128:
            accumulated += 8 * heads * _round_up(call.keys, 128) * _round_up(call.head_dim, 32)
        return [*delta, accumulated]
    return []

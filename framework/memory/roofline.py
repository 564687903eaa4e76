"""Seconds of the card for each recorded kernel: the slower of its arithmetic, its traffic and its launch.

Products reach a share of the matrix rate that their shape decides, attention one that its kernel and head width decide,
all others a share of the memory's bandwidth by what they do. The shares were fitted on one kind of card; another has
its own peaks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from framework.memory.trace import Launcher, Operation
from framework.schema.gpu import GPUParams

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_TENSOR_CORE = ("bfloat16", "float16", "tf32", *_FP8)
_TILES = {(128, 256): 1.0, (128, 128): 0.97, (64, 128): 0.9, (64, 64): 0.8}
"""Tiles of the output that one multiprocessor computes at a time, as cuBLAS chooses them on Hopper and Ampere, and the
share of the rate of the largest; the shares are those of four with which the products of twelve steps on an H200 spread
least around their planned times."""
_WIDE_HEAD = 128
"""Width of heads for which attention reaches its share; narrower ones reach less."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's rates that kernels reach, and times that no rate explains."""

    product: float
    """Share of the matrix rate when every multiprocessor is busy."""
    product_odd: float
    """The same of 2-byte products of matrices with an odd row length, for which cuBLAS has old kernels only: a
    vocabulary of 50,257."""
    product_float32: float
    attention_forward: float
    attention_backward: float
    attention_narrow: float
    """Power of (width of a head / 128) by which narrower heads reach less."""
    attention_float32: float
    """Of the rate outside tensor cores, which the float32 kernel partly uses."""
    bandwidth: float
    """Elementwise kernels and copies."""
    reduction_bandwidth: float
    """Kernels that reduce, sort, gather or scatter."""
    update_bandwidth: float
    """Updates of an optimizer over lists of tensors."""
    triton_bandwidth: float
    compiled_bandwidth: float
    unpack_bandwidth: float
    """bitsandbytes making plain weights of 4 bits."""
    coded_bandwidth: float
    """bitsandbytes updating 8-bit states."""
    product_seconds: float
    """Start and end of one matrix product or attention call on the card."""
    launch_seconds: float
    """Start and end of any kernel."""
    link: float = 5.5 / 6.3
    """Of the rate between host and card, for pinned memory (framework/run/planning/calibrate.py)."""
    card_link: float = 0.7
    """Of the rate between two cards, for one large exchange with nothing next to it (an all-reduce of 1 GiB on two H100
    reached 329 of 450 GB/s)."""
    card_link_beside: float = 0.3
    """The same next to kernels that keep the card busy."""
    collective_seconds: float = 25e-6
    """Start and end of one exchange."""
    sharded_update_seconds: float = 20e-3
    """What a sharded step takes beyond all that. Its cause was not found: the update alone took as long with copies.

    This and `card_link_beside` were fitted to twelve sharded steps on two H200 (torch 2.11, 2026-11-28;
    tests/calibration/h200_sharded_step.json)."""


CALIBRATED = Efficiency(
    product=0.734,
    product_odd=0.117,
    product_float32=0.745,
    attention_forward=0.355,
    attention_backward=0.354,
    attention_narrow=0.504,
    attention_float32=0.82,
    bandwidth=0.72,
    reduction_bandwidth=0.8,
    update_bandwidth=0.46,
    triton_bandwidth=0.7,
    compiled_bandwidth=0.711,
    unpack_bandwidth=0.9,
    coded_bandwidth=0.108,
    product_seconds=1.5e-6,
    launch_seconds=1.75e-6,
)
"""Shares by which the kernels of 16 steps on an H200 (torch 2.11+cu130, 2026-11-29, rows of one seed), each timed, take
what was planned in the median of a class: what a step needs of the card is right within 7.3 % in their median, and
within 8.9 % in that of 14 steps of another seed (18 % before; benchmarks/results/step_time_phases_h200.json). Products,
attention and what Inductor generates are as twelve older steps and whole steps have them."""


def kernel_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency = CALIBRATED) -> tuple[float, float]:
    """(arithmetic, traffic) of a kernel, each as if it were alone. The card's rates are known."""
    assert card.bandwidth_bytes_per_second is not None
    traffic = operation.bytes / (card.bandwidth_bytes_per_second * _bandwidth_share(operation, efficiency))
    if _is_attention(operation):
        traffic = 0.0  # scores stay on the chip; its operands are small next to its arithmetic
    return _arithmetic_seconds(operation, card, efficiency), traffic


def _is_attention(operation: Operation) -> bool:
    return "attention" in operation.name


def _bandwidth_share(operation: Operation, efficiency: Efficiency) -> float:
    if operation.launcher is Launcher.BITSANDBYTES:
        return efficiency.coded_bandwidth if operation.name.endswith("update_8") else efficiency.unpack_bandwidth
    if operation.launcher is Launcher.TRITON:
        return efficiency.triton_bandwidth
    if operation.launcher is Launcher.COMPILED and not operation.flops:
        return efficiency.compiled_bandwidth
    if operation.tensors > 1:
        return efficiency.update_bandwidth
    return efficiency.reduction_bandwidth if operation.name in _REDUCTIONS else efficiency.bandwidth


_REDUCTIONS = frozenset(
    {
        *("sum", "mean", "linalg_vector_norm", "native_layer_norm", "native_layer_norm_backward", "_softmax"),
        *("_softmax_backward_data", "_safe_softmax", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
        *("nll_loss_forward", "nll_loss_backward", "embedding", "embedding_dense_backward", "cumsum", "topk", "sort"),
        *("index", "index_put", "index_put_", "index_add", "index_select", "scatter", "scatter_add", "gather"),
        *("token_losses_",),
    }
)


def _arithmetic_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency) -> float:
    if not operation.flops:
        return 0.0
    full = operation.dtype not in _TENSOR_CORE
    if _is_attention(operation):
        share = _attention_share(operation, efficiency, full)
    else:
        rate = efficiency.product if operation.is_aligned else efficiency.product_odd
        share = efficiency.product_float32 if full else rate
        share *= occupancy(operation.shape, card.multiprocessors or 1)
    start = efficiency.product_seconds if card.product_seconds is None else card.product_seconds
    return operation.flops / (dense_rate(operation.dtype, card) * share) + start


def _attention_share(operation: Operation, efficiency: Efficiency, full: bool) -> float:
    if full:
        return efficiency.attention_float32
    backward = operation.name.endswith("backward")
    share = efficiency.attention_backward if backward else efficiency.attention_forward
    width = operation.shape[-1] if operation.shape else _WIDE_HEAD
    return float(share * min(1.0, width / _WIDE_HEAD) ** efficiency.attention_narrow)


def dense_rate(dtype: str, card: GPUParams) -> float:
    """FLOPs a second of matrix products in a type, by the card's data sheet; its float32 rate has to be known."""
    rates = {"bfloat16": card.bf16_flops, "float16": card.fp16_flops, "tf32": card.tf32_flops}
    rates |= dict.fromkeys(_FP8, card.fp8_flops)
    rate = rates.get(dtype) or card.fp32_flops  # torch computes float32 products without tf32 unless told otherwise
    assert rate is not None
    return rate


def occupancy(shape: Sequence[int], multiprocessors: int) -> float:
    """Share of the multiprocessors that work on average: the last wave of tiles seldom fills them all."""
    if not shape:
        return 1.0
    return max(share * _waves(shape, tile, multiprocessors) for tile, share in _TILES.items())


def _waves(shape: Sequence[int], tile: tuple[int, int], multiprocessors: int) -> float:
    batch, rows, columns, _ = shape
    tiles = max(1, batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]))
    return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)

"""Card time of each recorded kernel: the slowest of arithmetic, memory traffic and launch.

Products reach a share of the matrix rate that depends on their shape, attention one that depends on kernel and head
width, all others a share of the memory bandwidth by their kind. The shares were fitted on one kind of card and are
applied to the peak rates of others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from framework.memory.trace import LINK_COPY, TRANSFER, UNPINNED_COPY, Launcher, Operation
from framework.schema.gpu import GPUParams

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_TENSOR_CORE = ("bfloat16", "float16", "tf32", *_FP8)
_TILES = {(128, 256): 1.0, (128, 128): 0.97, (64, 128): 0.9, (64, 64): 0.8}
"""Output tiles that one multiprocessor computes at a time, as cuBLAS chooses them on Hopper and Ampere, with their rate
relative to the largest tile: of four sets of rates the one with which the products of twelve steps on an H200 deviated
least from their planned times."""
_WIDE_HEAD = 128
"""Head width at which attention reaches its full share; narrower heads reach less."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of data-sheet rates that kernels reach, and fixed times."""

    product: float
    """Share of the matrix rate with all multiprocessors busy."""
    product_odd: float
    """The same for 2-byte matrices with an odd row length, such as a vocabulary of 50,257, for which cuBLAS only has
    old kernels."""
    product_float32: float
    product_grouped: float
    """The same for a grouped product of 2-byte matrices, as experts have them."""
    attention_forward: float
    attention_backward: float
    attention_narrow: float
    """Exponent of (head width / 128) by which narrower heads reach less."""
    attention_float32: float
    """Share of the rate without tensor cores, which the float32 kernel uses in part."""
    attention_float32_narrow: float
    """`attention_narrow` of the float32 kernel."""
    bandwidth: float
    """Elementwise kernels that load vectors, and copies."""
    elements_per_multiprocessor: float
    """Elements per second of elementwise kernels that load them one by one, whatever their bytes."""
    reduction_bandwidth: float
    """Reductions, sorts, gathers and scatters."""
    column_bandwidth: float
    """Sums over rows, such as gradients of biases and norms, and LayerNorm."""
    norm_backward_bandwidth: float
    """Backward of LayerNorm, which sums over rows twice."""
    sort_seconds: float
    """Time of a sort, scan or histogram of few values, which takes several kernels."""
    update_bandwidth: float
    """Foreach updates of an optimizer."""
    triton_bandwidth: float
    compiled_bandwidth: float
    unpack_bandwidth: float
    """Dequantization of 4-bit weights by bitsandbytes."""
    coded_bandwidth: float
    """Updates of 8-bit states by bitsandbytes."""
    product_seconds: float
    """Fixed time of a matrix product or attention call on the card."""
    launch_seconds: float
    """Fixed time of any kernel."""
    link: float = 5.5 / 6.3
    """Share of the rate between host and card, for pinned memory (framework/run/planning/calibrate.py)."""
    unpinned_bytes_per_second: float = 9.6e9
    """Rate of copies that are not of pinned memory, which the driver makes through a buffer of its own: AdamW's states
    of the 1B in files that the host caches, 2 x 4.9 GB, took 1.03 s of a step on an H200
    (benchmarks/results/levers_h200.json). A slower disk's additional time is not known and not counted."""
    card_link: float = 0.7
    """Share of the rate between two cards, for one large exchange on idle cards (an all-reduce of 1 GiB on two H100
    reached 329 of 450 GB/s)."""
    card_link_busy: float = 0.3
    """The same on busy cards."""
    collective_seconds: float = 25e-6
    """Fixed time of one exchange."""
    sharded_update_seconds: float = 20e-3
    """Additional time of a sharded step, of unknown cause: the update alone took as long under data parallelism.

    This and `card_link_busy` were fitted to twelve sharded steps on two H200 (torch 2.11, 2026-11-28;
    tests/calibration/h200_sharded_step.json)."""


CALIBRATED = Efficiency(
    product=0.734,
    product_odd=0.117,
    product_float32=0.82,
    product_grouped=0.4,
    attention_forward=0.355,
    attention_backward=0.354,
    attention_narrow=0.504,
    attention_float32=0.82,
    attention_float32_narrow=1.1,
    bandwidth=0.9,
    elements_per_multiprocessor=2.7e9,
    reduction_bandwidth=0.8,
    column_bandwidth=0.33,
    norm_backward_bandwidth=0.23,
    sort_seconds=20e-6,
    update_bandwidth=0.46,
    triton_bandwidth=0.7,
    compiled_bandwidth=0.711,
    unpack_bandwidth=0.9,
    coded_bandwidth=0.108,
    product_seconds=1.5e-6,
    launch_seconds=1.75e-6,
)
"""Fitted to the individually timed kernels of 16 steps on an H200 (torch 2.11+cu130, 2026-11-29), so that the median
kernel of each class takes its planned time. The median error of a step's card time is 7.3 % on these steps and 8.9 % on
14 others (18 % before; benchmarks/results/step_time_phases_h200.json). Products, attention and generated kernels are
fitted to twelve older steps and to whole steps; float32, grouped products, sums over rows, LayerNorm and sorts to six
steps and 684 single products of another H200 (2026-11-30; docs/evidence/planner.md). Of eight steps there (132
multiprocessors) elements that are loaded one by one pass at 290 to 380e9 a second, 355e9 in the median, and the other
elementwise kernels move 0.8 to 0.95 of the bandwidth from memory, more from the cache."""


def kernel_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency = CALIBRATED) -> tuple[float, float]:
    """Seconds of (arithmetic, traffic) of a kernel, each by itself, on a card with known rates."""
    assert card.bandwidth_bytes_per_second is not None
    traffic = operation.bytes / (card.bandwidth_bytes_per_second * _bandwidth_share(operation, efficiency))
    if _is_attention(operation):
        traffic = 0.0  # scores stay on the chip, and operands are small compared with the arithmetic
    if operation.name in (TRANSFER, LINK_COPY, UNPINNED_COPY):
        link = (card.host_link_bytes_per_second or math.inf) * efficiency.link
        is_pinned = operation.name != UNPINNED_COPY
        traffic = operation.bytes / (link if is_pinned else min(link, efficiency.unpinned_bytes_per_second))
    if operation.one_by_one and card.multiprocessors:
        rate = efficiency.elements_per_multiprocessor * card.multiprocessors
        traffic = max(traffic, operation.one_by_one / rate)
    if operation.name in _SORTS:
        traffic += efficiency.sort_seconds
    return _arithmetic_seconds(operation, card, efficiency), traffic


def _is_attention(operation: Operation) -> bool:
    return "attention" in operation.name


def _bandwidth_share(operation: Operation, efficiency: Efficiency) -> float:
    if operation.launcher is Launcher.BITSANDBYTES:
        return efficiency.coded_bandwidth if operation.name.endswith("update_8") else efficiency.unpack_bandwidth
    if operation.launcher is Launcher.TRITON:
        return efficiency.triton_bandwidth
    if operation.name in _UNPACKS:
        return efficiency.unpack_bandwidth
    if operation.launcher is Launcher.COMPILED and not operation.flops:
        return efficiency.compiled_bandwidth
    if operation.tensors > 1 or operation.name.startswith("_foreach_"):
        return efficiency.update_bandwidth
    if operation.name == "native_layer_norm_backward":
        return efficiency.norm_backward_bandwidth
    if operation.name == "native_layer_norm" or (operation.name == "sum" and operation.phase in _PASSES):
        return efficiency.column_bandwidth
    return efficiency.reduction_bandwidth if operation.name in _REDUCTIONS else efficiency.bandwidth


_UNPACKS = ("unpack", "dequantize_4bit", "dequantize_blockwise")
"""Kernels of bitsandbytes in compiled code."""

_PASSES = ("forward", "recompute", "backward")

_SORTS = ("sort", "topk", "cumsum", "histc", "index_put")
"""`index_put` without the underscore is the gradient of an index, which sorts the indices to add what is equal."""

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
        rate = efficiency.product_grouped if operation.name == "_grouped_mm" else rate
        share = efficiency.product_float32 if full else rate
        share *= occupancy(operation.shape, card.multiprocessors or 1)
    start = efficiency.product_seconds if card.product_seconds is None else card.product_seconds
    return operation.flops / (dense_rate(operation.dtype, card) * share) + start


def _attention_share(operation: Operation, efficiency: Efficiency, full: bool) -> float:
    width = operation.shape[-1] if operation.shape else _WIDE_HEAD
    narrow = min(1.0, width / _WIDE_HEAD)
    if full:
        return float(efficiency.attention_float32 * narrow**efficiency.attention_float32_narrow)
    backward = operation.name.endswith("backward")
    share = efficiency.attention_backward if backward else efficiency.attention_forward
    return float(share * narrow**efficiency.attention_narrow)


def dense_rate(dtype: str, card: GPUParams) -> float:
    """Data-sheet FLOPs per second of matrix products in a dtype, for a card with a known float32 rate."""
    rates = {"bfloat16": card.bf16_flops, "float16": card.fp16_flops, "tf32": card.tf32_flops}
    rates |= dict.fromkeys(_FP8, card.fp8_flops)
    rate = rates.get(dtype) or card.fp32_flops  # torch's default for float32 products is without tf32
    assert rate is not None
    return rate


def occupancy(shape: Sequence[int], multiprocessors: int) -> float:
    """Average share of busy multiprocessors: the last wave of tiles seldom fills all of them."""
    if not shape:
        return 1.0
    return max(share * _waves(shape, tile, multiprocessors) for tile, share in _TILES.items())


def _waves(shape: Sequence[int], tile: tuple[int, int], multiprocessors: int) -> float:
    batch, rows, columns, _ = shape
    tiles = max(1, batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]))
    return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)

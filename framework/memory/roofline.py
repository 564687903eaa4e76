"""Seconds of a step from the list of its operator calls: a roofline for each kernel, and the host that launches them.

A kernel takes as long as the slowest of its arithmetic, its traffic and its launch. The host needs time for every call,
views included; a kernel starts when it has been launched and the one before it is done.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from framework.memory.trace import EXCHANGE, GATHER, GRAPH, RECOMPUTED, REDUCE, TAKE_OVER, TRANSFER, Operation
from framework.schema.gpu import GPUParams

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_TENSOR_CORE = ("bfloat16", "float16", "tf32", *_FP8)
_TILE = (128, 256)
_SMALL_TILE, _SMALL_TILE_SHARE = (128, 128), 0.9
"""Tiles of the output that one multiprocessor computes at a time, as cuBLAS chooses them on Hopper and Ampere."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's rates that kernels reach, and times that no rate explains."""

    product: float
    """Share of the matrix rate when every multiprocessor is busy."""
    product_float32: float
    attention_forward: float
    attention_backward: float
    attention_float32: float
    """Of the rate outside tensor cores, which the float32 kernel partly uses."""
    bandwidth: float
    product_seconds: float
    """Start and end of one matrix product or attention call on the card."""
    launch_seconds: float
    """Shortest kernel."""
    host_product_seconds: float
    """Host time of a matrix product or attention call: a module, its linear function, and cuBLAS or cuDNN."""
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    """Host time of one other kernel call, by phase; a checkpoint's recomputation goes through its hooks."""
    forward_view_seconds: float
    recompute_view_seconds: float
    backward_view_seconds: float
    """Host time of a call that launches nothing."""
    unpack_seconds: float
    """Host time of handing a saved tensor back through a checkpoint's hooks, which shows as a `detach` in backward."""
    compiled_seconds: float
    """Host time of a kernel that generated code launches, with neither autograd nor modules around it."""
    graph_seconds: float
    """Host time of entering a graph of compiled code: its guards, its arguments, autograd's node."""
    recomputed_graph_seconds: float
    """The same where a checkpoint computes it again, with its hooks for all that the graph keeps."""
    step_seconds: float
    """Host time between two steps: batch, schedule, the wait for the loss."""
    link: float = 5.5 / 6.3
    """Of the rate between host and card, for pinned memory (framework/run/planning/calibrate.py)."""
    card_link: float = 0.7
    """Of the rate between two cards, for one large exchange with nothing beside it (an all-reduce of 1 GiB on two H100
    reached 329 of 450 GB/s)."""
    card_link_beside: float = 0.3
    """The same beside kernels that keep the card busy."""
    collective_seconds: float = 25e-6
    """Start and end of one exchange."""
    collective_host_seconds: float = 0.75e-3
    """Host time of one gather or reduction: FSDP2's hooks around a block, its copies and allocations."""
    sharded_update_seconds: float = 20e-3
    """What a sharded step takes beyond all that. Its cause was not found: the update alone took as long with copies.

    This, `card_link_beside` and `collective_host_seconds` were fitted to twelve sharded steps on two H200 (torch 2.11,
    2026-11-28), which they leave within 8.6 % (tests/calibration/h200_sharded_step.json)."""

    def with_host(self, share: float) -> "Efficiency":
        """The same card beside a host that needs this share of the time."""
        return replace(self, **{name: share * getattr(self, name) for name in _OF_THE_HOST})


_OF_THE_HOST = (
    *("host_product_seconds", "forward_seconds", "recompute_seconds", "backward_seconds", "optimizer_seconds"),
    *("forward_view_seconds", "recompute_view_seconds", "backward_view_seconds", "unpack_seconds"),
    *("compiled_seconds", "graph_seconds", "recomputed_graph_seconds", "step_seconds", "collective_host_seconds"),
)


CALIBRATED = Efficiency(
    product=0.848,
    product_float32=0.951,
    attention_forward=0.267,
    attention_backward=0.738,
    attention_float32=1.1,
    bandwidth=0.69,
    product_seconds=10.7e-6,
    launch_seconds=2.5e-6,
    host_product_seconds=44.5e-6,
    forward_seconds=15.9e-6,
    recompute_seconds=28.5e-6,
    backward_seconds=17.6e-6,
    optimizer_seconds=18.1e-6,
    forward_view_seconds=1.9e-6,
    recompute_view_seconds=24.4e-6,
    backward_view_seconds=4.9e-6,
    unpack_seconds=26.7e-6,
    compiled_seconds=24.3e-6,
    graph_seconds=0.303e-3,
    recomputed_graph_seconds=0.964e-3,
    step_seconds=8.8e-3,
)
"""Fitted to step times on an H100 80GB HBM3 (torch 2.11+cu130, driver 580, 2026-11): the rows of
tests/calibration/h100_plain_step.json and the seeded half of h100_product_step.json; judged on the other half
(docs/evidence/planner.md). One process on an otherwise idle machine; a slower processor makes the host's times longer.
The three times of compiled code are fitted to six steps that wait for the host: 256 tokens a micro batch of the 0.6B,
1B and 8B (LoRA) beside an H200 (2026-11-28; tests/calibration/h200_host_step.json), which they leave within 5 %."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `compute` and `memory` are the device's time in kernels bound by either; they add up.

    `device` is the device's timeline with its gaps. It, the host and what is exchanged go on beside each other; all of
    them wait for what is `alone`.
    """

    device: float
    compute: float
    memory: float
    host: float
    communication: float = 0.0
    alone: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of what goes on at once, and what does not."""
        return max(self.device, self.host, self.communication) + self.alone

    @property
    def bound_by(self) -> str:
        """compute, memory, communication or host: whichever the step waits for most."""
        device = {"compute": self.compute, "memory": self.memory, "communication": self.communication + self.alone}
        if self.host > sum(device.values()):
            return "host"
        return max(device, key=lambda name: device[name])


def estimate_step(operations: Iterable[Operation], card: GPUParams, efficiency: Efficiency = CALIBRATED) -> StepTime:
    """Time of `operations` launched one after the other on `card`. Raises ValueError where its rates are not known."""
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        raise ValueError(f"the rates of {card.name} are not known")
    host = efficiency.step_seconds
    compute = memory = communication = done = 0.0
    link = gathered = update = 0.0
    known: dict[Operation, tuple[float, float, float]] = {}  # blocks are alike, so most calls were seen before
    for operation in operations:
        costs = known.get(operation)
        if costs is None:
            costs = _host_seconds(operation, efficiency), *_kernel_seconds(operation, card, efficiency)
            known[operation] = costs
        on_host, arithmetic, traffic = costs
        host += on_host
        if not operation.bytes:
            continue
        if operation.name in (GATHER, REDUCE):
            exchange = _exchange_seconds(operation, card, efficiency, efficiency.card_link_beside)
            communication += exchange
            host += efficiency.collective_host_seconds
            update = efficiency.sharded_update_seconds
            link = max(link, host, done if operation.name == REDUCE else 0.0) + exchange
            gathered = link if operation.name == GATHER else gathered
            continue
        if operation.name == EXCHANGE:
            exchange = _exchange_seconds(operation, card, efficiency, efficiency.card_link)
            communication += exchange
            done = link = max(link, host, done) + exchange
            continue
        if operation.name == TAKE_OVER:
            done = max(done, gathered)
        elif operation.phase == "optimizer_step":
            done = max(done, link)
        if operation.name == TRANSFER:
            communication += operation.bytes / ((card.host_link_bytes_per_second or math.inf) * efficiency.link)
            continue
        kernel = max(arithmetic, traffic, efficiency.launch_seconds)
        if arithmetic >= traffic:
            compute += kernel
        else:
            memory += kernel
        done = max(done, host) + kernel
    return StepTime(done, compute, memory, host, communication, alone=update)


def _exchange_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency, share: float) -> float:
    """On the link of the cards, by which one exchange follows the other; at once where its rate is not known."""
    rate = card.link_bytes_per_second or math.inf
    return operation.bytes / (rate * share) + efficiency.collective_seconds


def repeat_micro_batches(step: StepTime, one_more: StepTime, times: int) -> StepTime:
    """`step` with `times` more micro batches, when `one_more` is the same step with one more."""
    return StepTime(
        **{
            item.name: getattr(step, item.name) + times * (getattr(one_more, item.name) - getattr(step, item.name))
            for item in fields(StepTime)
        }
    )


def _is_attention(operation: Operation) -> bool:
    return "attention" in operation.name


def _host_seconds(operation: Operation, efficiency: Efficiency) -> float:
    phase = operation.phase
    if operation.name == GRAPH:
        return efficiency.recomputed_graph_seconds if phase == RECOMPUTED else efficiency.graph_seconds
    if operation.compiled and operation.bytes:
        return efficiency.compiled_seconds
    if not operation.bytes:
        if phase == "backward":
            return efficiency.unpack_seconds if operation.name == "detach" else efficiency.backward_view_seconds
        return efficiency.recompute_view_seconds if phase == RECOMPUTED else efficiency.forward_view_seconds
    if operation.flops:
        return efficiency.host_product_seconds
    if phase == "backward":
        return efficiency.backward_seconds
    if phase == RECOMPUTED:
        return efficiency.recompute_seconds
    return efficiency.optimizer_seconds if phase == "optimizer_step" else efficiency.forward_seconds


def _kernel_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency) -> tuple[float, float]:
    """(arithmetic, traffic) of a kernel, each as if it were alone."""
    assert card.bandwidth_bytes_per_second is not None
    traffic = operation.bytes / (card.bandwidth_bytes_per_second * efficiency.bandwidth)
    if _is_attention(operation):
        traffic = 0.0  # scores stay on the chip; its operands are small beside its arithmetic
    return _arithmetic_seconds(operation, card, efficiency), traffic


def _arithmetic_seconds(operation: Operation, card: GPUParams, efficiency: Efficiency) -> float:
    if not operation.flops:
        return 0.0
    full = operation.dtype not in _TENSOR_CORE
    if _is_attention(operation):
        backward = operation.name.endswith("backward")
        share = efficiency.attention_backward if backward else efficiency.attention_forward
        share = efficiency.attention_float32 if full else share
    else:
        share = efficiency.product_float32 if full else efficiency.product
        share *= _occupancy(operation.shape, card.multiprocessors or 1)
    return operation.flops / (_rate(operation.dtype, card) * share) + efficiency.product_seconds


def _rate(dtype: str, card: GPUParams) -> float:
    rates = {"bfloat16": card.bf16_flops, "float16": card.fp16_flops, "tf32": card.tf32_flops}
    rates |= dict.fromkeys(_FP8, card.fp8_flops)
    rate = rates.get(dtype) or card.fp32_flops  # torch computes float32 products without tf32 unless told otherwise
    assert rate is not None
    return rate


def _occupancy(shape: Sequence[int], multiprocessors: int) -> float:
    """Share of the multiprocessors that work on average: the last wave of tiles seldom fills them all."""
    if not shape:
        return 1.0
    return max(_waves(shape, _TILE, multiprocessors), _SMALL_TILE_SHARE * _waves(shape, _SMALL_TILE, multiprocessors))


def _waves(shape: Sequence[int], tile: tuple[int, int], multiprocessors: int) -> float:
    batch, rows, columns, _ = shape
    tiles = max(1, batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]))
    return tiles / (math.ceil(tiles / multiprocessors) * multiprocessors)

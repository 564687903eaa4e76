"""Step time from the operator calls of a rehearsal: a simulation of host, card and link, and everything beyond it.

In the simulation the host issues calls to a queue, from which the card executes them. A kernel starts when it has been
issued and the previous one has finished. The host continues after issuing a call, until it needs a value from the card,
for which it waits. Exchanges between ranks have a separate queue, and so have transfers of activations to the host and
back.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import mean

from framework.memory.host_time import FITTED, HostCosts, host_seconds
from framework.memory.ledger import BatchUse, StepCost
from framework.memory.roofline import CALIBRATED, Efficiency, kernel_seconds
from framework.memory.trace import (
    EXCHANGE,
    GATHER,
    HOLD,
    LINK_COPY,
    REDUCE,
    TAKE_OVER,
    TRANSFER,
    UNPINNED_COPY,
    WAIT,
    Launcher,
    Operation,
    Rehearsal,
    Space,
    Trace,
)
from framework.schema.choices import EmaDevice
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `compute` and `memory` are the device's times in kernels bound by either; they are disjoint.

    `device` is when the last kernel ends, including gaps between kernels; `host` is when the host has issued the last
    call, including its `waits` for the device. Exchanges overlap with both; nothing overlaps with `alone`.
    """

    device: float
    compute: float
    memory: float
    host: float
    communication: float = 0.0
    alone: float = 0.0
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of the overlapping times, plus `alone`."""
        return max(self.device, self.host, self.communication) + self.alone

    @property
    def bound_by(self) -> str:
        """compute, memory, communication or host: whichever limits the step."""
        device = {"compute": self.compute, "memory": self.memory, "communication": self.communication + self.alone}
        if self.host - self.waits > sum(device.values()):
            return "host"
        return max(device, key=lambda name: device[name])


@dataclass
class _Timeline:
    """Current times of host, card and link, in seconds since the step began."""

    card: GPUParams
    efficiency: Efficiency
    host: float
    done: float = 0.0
    """When the card has executed everything issued."""
    link: float = 0.0
    """When the last exchange between cards ends."""
    arrivals: list[float] = field(default_factory=list)
    """When each transfer between host and card ends."""
    gathered: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    waits: float = 0.0
    update: float = 0.0

    def wait(self, operation: Operation) -> None:
        """Let the host read a value, or wait for everything as bitsandbytes does (torch.cuda.synchronize)."""
        until = self.done
        if operation.launcher is Launcher.BITSANDBYTES and self.arrivals:
            until = max(until, self.arrivals[-1])
        self.waits += max(0.0, until - self.host)
        self.host = max(self.host, until)

    def hold(self, operation: Operation) -> None:
        """Let later kernels wait for transfers."""
        if operation.tensors < len(self.arrivals):
            self.done = max(self.done, self.arrivals[-1 - operation.tensors])

    def exchange(self, operation: Operation) -> None:
        """Run an exchange between cards, after the previous one and after its input is ready."""
        stops = operation.name == EXCHANGE
        share = self.efficiency.card_link if stops else self.efficiency.card_link_busy
        rate = self.card.link_bytes_per_second or math.inf
        seconds = operation.bytes / (rate * share) + self.efficiency.collective_seconds
        self.communication += seconds
        after_kernels = stops or operation.name == REDUCE
        self.link = max(self.link, self.host, self.done if after_kernels else 0.0) + seconds
        if stops:
            self.done = self.link
            return
        self.update = self.efficiency.sharded_update_seconds
        if operation.name == GATHER:
            self.gathered = self.link

    def transfer(self, traffic: float) -> None:
        """Run a transfer between host and card, after the previous one and after the kernels issued so far."""
        seconds = traffic + self.efficiency.launch_seconds
        self.communication += seconds
        self.arrivals.append(max([self.host, self.done, *self.arrivals[-1:]]) + seconds)

    def compute_kernel(self, operation: Operation, arithmetic: float, traffic: float) -> None:
        """Run a kernel on the card."""
        if operation.name == TAKE_OVER:
            self.done = max(self.done, self.gathered)
        elif operation.phase == "optimizer_step":
            self.done = max(self.done, self.link)
        seconds = max(arithmetic, traffic) + self.efficiency.launch_seconds
        if operation.name in (LINK_COPY, UNPINNED_COPY):
            self.communication += seconds
        elif arithmetic >= traffic:
            self.compute += seconds
        else:
            self.memory += seconds
        self.done = max(self.done, self.host) + seconds


def estimate_step(
    operations: Iterable[Operation],
    card: GPUParams,
    efficiency: Efficiency = CALIBRATED,
    costs: HostCosts = FITTED,
) -> StepTime:
    """Time of `operations` issued in order to `card`. Raises ValueError if its rates are unknown."""
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        raise ValueError(f"the rates of {card.name} are not known")
    line = _Timeline(card, efficiency, host=costs.step)
    known: dict[Operation, tuple[float, float, float]] = {}  # blocks are equal, so most calls recur
    for operation in operations:
        seconds = known.get(operation)
        if seconds is None:
            seconds = host_seconds(operation, costs), *kernel_seconds(operation, card, efficiency)
            known[operation] = seconds
        on_host, arithmetic, traffic = seconds
        if operation.name == WAIT:
            line.wait(operation)
        elif operation.name == HOLD:
            line.hold(operation)
        line.host += on_host
        if not operation.bytes:
            continue
        if operation.name in (GATHER, REDUCE, EXCHANGE):
            line.exchange(operation)
        elif operation.name == TRANSFER:
            line.transfer(traffic)
        else:
            line.compute_kernel(operation, arithmetic, traffic)
    return StepTime(line.done, line.compute, line.memory, line.host, line.communication, line.update, line.waits)


def repeat_micro_batches(step: StepTime, one_more: StepTime, times: int) -> StepTime:
    """`step` with `times` additional micro-batches, where `one_more` is the step with one."""
    return StepTime(
        **{
            item.name: getattr(step, item.name) + times * (getattr(one_more, item.name) - getattr(step, item.name))
            for item in fields(StepTime)
        }
    )


HOST_SHARES = (0.84, 1.03, 1.28)
"""Host speeds whose step times are averaged if the host was not measured, as shares of the fitted host times: the 1/6,
1/2 and 5/6 quantiles of the eight machines with an H200 in the fit, which range from 0.79 to 1.4 (2026-11;
benchmarks/results/step_time_fit_h200.json). A step takes the longer of card and host time, so if both are similar, a
slow host costs more than a fast one gains."""


def steady_step(trace: Trace) -> list[Operation]:
    """The operator calls of the last rehearsed step, from its first forward to its end."""
    last = max(index for index, mark in enumerate(trace.marks) if mark.phase == "optimizer_step")
    earlier = [index for index, mark in enumerate(trace.marks[:last]) if mark.phase == "end"]
    start = trace.marks[earlier[-1]].operation
    return trace.operations[start : trace.marks[last + 1].operation]


def last_micro_batch(operations: Sequence[Operation]) -> tuple[int, int]:
    """Positions in a step's operations at which its last micro-batch begins and ends."""
    end = next(index for index, operation in enumerate(operations) if operation.phase == "optimizer_step")
    start = max(
        index
        for index, operation in enumerate(operations[:end])
        if operation.phase == "forward" and (not index or operations[index - 1].phase != "forward")
    )
    return start, end


def step_time(rehearsal: Rehearsal, costs: HostCosts = FITTED) -> StepTime | None:
    """Time of one optimizer step with all its micro-batches; None if the card's rates are unknown."""
    card = rehearsal.config.gpu
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        return None
    operations = steady_step(rehearsal.trace)
    if rehearsal.config.training.tf32:
        operations = [_in_tf32(operation) for operation in operations]
    rehearsed = estimate_step(operations, card, costs=costs)
    accumulation = rehearsal.config.batch.accumulation
    if accumulation <= rehearsal.micro_batches:
        return rehearsed
    start, end = last_micro_batch(operations)
    one_more = estimate_step([*operations[:end], *operations[start:end], *operations[end:]], card, costs=costs)
    return repeat_micro_batches(rehearsed, one_more, accumulation - rehearsal.micro_batches)


HOST_UPDATE_BYTES_PER_SECOND = 20e9
"""Bytes per second that AdamW reads and writes on a rank's CPU cores. The 1B over two H200 took 1.0 s longer with
`fsdp.cpu_offload`, with two threads per rank (2026-11-28); the launcher gives each rank its share of all cores."""
HOST_AVERAGE_BYTES_PER_SECOND = 35e9
"""The same for an average of the weights, whose loop is one pass. With four threads 6.2 GB took 0.15 and 0.21 s on two
machines with an H200 (30 and 41 GB/s, 2026-11-30): 10 GB/s a thread, as with two above. A run takes all cores of its
share; how many those are, and where the memory itself ends, a plan does not know."""


def with_update_on_host(time: StepTime, rehearsal: Rehearsal) -> StepTime:
    """Add the update of offloaded shards by the host, for which the card waits."""
    if not rehearsal.config.fsdp.is_on_host:
        return time
    footprint = rehearsal.footprint
    moved = 3 * sum(footprint.trained_sizes) + 2 * sum(footprint.state_sizes)  # weights and states are read and written
    seconds = moved / HOST_UPDATE_BYTES_PER_SECOND
    return replace(time, alone=time.alone + seconds)


def with_average_on_host(time: StepTime, rehearsal: Rehearsal) -> StepTime:
    """Add the update of averaged weights on the host after the step.

    The average is read and written, and the weights are read, at the rate of `HOST_AVERAGE_BYTES_PER_SECOND`.
    """
    training, link = rehearsal.config.training, rehearsal.config.gpu.host_link_bytes_per_second
    if training.ema_decay is None or training.ema_device is not EmaDevice.HOST or rehearsal.config.fsdp.is_on_host:
        return time
    footprint = rehearsal.footprint
    pairs = zip(footprint.state_sizes, footprint.state_spaces, strict=True)
    average = sum(size for size, space in pairs if space is Space.HOST)
    copies = sum(footprint.trained_sizes) / (link * CALIBRATED.link) if link is not None else 0.0
    return replace(time, alone=time.alone + copies + 3 * average / HOST_AVERAGE_BYTES_PER_SECOND)


BACKWARD_SHARE = 0.6
"""Share of backward in the time of a micro-batch: two thirds of its products, less if the loss computes gradients in
forward. Not measured."""


def with_gradient_exchange(time: StepTime, rehearsal: Rehearsal) -> StepTime:
    """Add the all-reduce of gradients under data parallelism.

    Each device sends and receives the gradients twice, less its own share, overlapped with the last backward pass. The
    step gets longer by the part that does not overlap, which is all of it with `training.on_oom: shrink`. The 1B on two
    H200 took 11 % longer than planned (2026-11-28).
    """
    card, config = rehearsal.config.gpu, rehearsal.config
    if not config.is_replicated or card.link_bytes_per_second is None:
        return time
    copies = card.count // config.fsdp.tensor_parallel_size
    sent = 2 * (copies - 1) / copies * sum(rehearsal.footprint.trained_sizes)
    exchange = sent / (card.link_bytes_per_second * CALIBRATED.card_link)
    if config.adds_up_after_backward:
        return replace(time, alone=time.alone + exchange)
    backward = BACKWARD_SHARE * time.device / config.batch.accumulation
    hidden = min(exchange, backward)
    return replace(time, alone=time.alone + exchange - hidden, communication=hidden)


def with_streamed_blocks(time: StepTime, rehearsal: Rehearsal, costs: HostCosts) -> StepTime:
    """Account for blocks that are copied from the host during computation: each pass takes the longer of the two.

    A short forward pass waits for its blocks even if the whole step computes longer than it copies: LoRA of the 8B on
    two rows took 10.1 s on an H200 (2026-11-28); predicted are 9.2 s, or 8.1 s if passes are not considered separately.
    """
    link, footprint = rehearsal.config.gpu.host_link_bytes_per_second, rehearsal.footprint
    if not footprint.streamed_bytes or link is None:
        return time
    operations = steady_step(rehearsal.trace)
    start, end = last_micro_batch(operations)
    forward = [operation for operation in operations[start:end] if operation.phase in ("forward", "loss")]
    backward = [operation for operation in operations[start:end] if operation.phase not in ("forward", "loss")]
    in_backward = footprint.streamed_in_backward_bytes
    waits = 0.0
    for part, sent in ((forward, footprint.streamed_bytes - in_backward), (backward, in_backward)):
        computing = estimate_step(part, rehearsal.config.gpu, costs=replace(costs, step=0.0)).seconds
        waits += max(0.0, sent / (link * CALIBRATED.link) - computing)
    accumulation = rehearsal.config.batch.accumulation
    copies, waits = accumulation * footprint.streamed_bytes / (link * CALIBRATED.link), accumulation * waits
    return replace(time, alone=time.alone + waits, communication=copies - waits)


def _in_tf32(operation: Operation) -> Operation:
    """A float32 matrix product at the rate of tf32; anything else unchanged."""
    is_product = operation.shape and operation.dtype == "float32" and "attention" not in operation.name
    return operation._replace(dtype="tf32") if is_product else operation


def step_cost(rehearsal: Rehearsal) -> StepCost | None:
    """Seconds and tokens per second of one optimizer step, the mean over hosts; None if the card's rates are
    unknown."""
    times = [time for costs in hosts_of(rehearsal.config) if (time := _with_all(rehearsal, costs)) is not None]
    if not times:
        return None
    seconds = mean(time.seconds for time in times)
    batch = batch_use(rehearsal.config)
    tokens = batch.accumulation * tokens_of(rehearsal.config) / rehearsal.config.fsdp.tensor_parallel_size
    bound_by = times[len(times) // 2].bound_by
    return StepCost(seconds, tokens / seconds, model_flops(rehearsal), bound_by)


def hosts_of(config: TrainingConfig) -> tuple[HostCosts, ...]:
    """The hosts over whose step times a plan averages: the measured one, or one for each speed of HOST_SHARES."""
    # a replayed CUDA graph launches its kernels itself
    costs = replace(FITTED, compiled=0.0) if config.training.cuda_graphs else FITTED
    host = config.gpu.host
    return (costs.of(host),) if host is not None else tuple(costs.scaled(share) for share in HOST_SHARES)


def _with_all(rehearsal: Rehearsal, costs: HostCosts) -> StepTime | None:
    """The step time including all communication."""
    time = step_time(rehearsal, costs)
    if time is None:
        return None
    time = with_streamed_blocks(time, rehearsal, costs)
    for adjusted in (with_gradient_exchange, with_update_on_host, with_average_on_host):
        time = adjusted(time, rehearsal)
    return time


def model_flops(rehearsal: Rehearsal) -> int:
    """FLOPs of the model for one step on one device: 6 per token and trained weight, 4 per frozen one, and attention.

    Attention is three times that of the rehearsed forward pass (backward computes twice as much).
    """
    batch, footprint = batch_use(rehearsal.config), rehearsal.footprint
    operations = steady_step(rehearsal.trace)
    start, end = last_micro_batch(operations)
    attention = sum(
        operation.flops
        for operation in operations[start:end]
        if operation.phase == "forward" and ("attention" in operation.name or operation.name == "bmm")
    )
    tokens = tokens_of(rehearsal.config)
    products = tokens * (6 * footprint.trained_products + 4 * footprint.frozen_products)
    return batch.accumulation * (products + 3 * attention)


def tokens_of(config: TrainingConfig) -> int:
    """Tokens of a micro-batch on one device, including both answers of a pair."""
    return config.batch.per_device * config.training.sequences_per_row * config.longest // config.context_size


def batch_use(config: TrainingConfig) -> BatchUse:
    """The batch of a config for a plan."""
    batch = config.batch
    sizes = (batch.per_device, batch.accumulation, batch.world, config.longest)
    return BatchUse(*sizes, batch.context, batch.tensor)

"""Simulation of a step from its list of calls: the host issues them to a queue, from which the card executes them.

A kernel starts when it has been issued and the previous one has finished. The host continues after issuing a call,
until it needs a value from the card, for which it waits. Exchanges between ranks have a separate queue.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from framework.memory.host_time import FITTED, HostCosts, host_seconds
from framework.memory.roofline import CALIBRATED, Efficiency, kernel_seconds
from framework.memory.trace import EXCHANGE, GATHER, REDUCE, TAKE_OVER, TRANSFER, WAIT, Operation
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
    gathered: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    waits: float = 0.0
    update: float = 0.0

    def wait(self) -> None:
        """Let the host read a value."""
        self.waits += max(0.0, self.done - self.host)
        self.host = max(self.host, self.done)

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

    def transfer(self, operation: Operation) -> None:
        """Run a transfer between host and card, overlapped with everything else."""
        rate = self.card.host_link_bytes_per_second or math.inf
        self.communication += operation.bytes / (rate * self.efficiency.link)

    def compute_kernel(self, operation: Operation, arithmetic: float, traffic: float) -> None:
        """Run a kernel on the card."""
        if operation.name == TAKE_OVER:
            self.done = max(self.done, self.gathered)
        elif operation.phase == "optimizer_step":
            self.done = max(self.done, self.link)
        seconds = max(arithmetic, traffic) + self.efficiency.launch_seconds
        if arithmetic >= traffic:
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
            line.wait()
        line.host += on_host
        if not operation.bytes:
            continue
        if operation.name in (GATHER, REDUCE, EXCHANGE):
            line.exchange(operation)
        elif operation.name == TRANSFER:
            line.transfer(operation)
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

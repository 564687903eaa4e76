"""Seconds of a step from the list of its calls: the host issues them, the card works, with a queue between the two.

A kernel starts when it has been issued and the one before it is done. The host goes on as soon as it has issued a
call, until it needs a value from the card: there it waits for all that was issued. Exchanges between ranks have a queue
of their own.
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
    """Seconds of one step. `compute` and `memory` are the device's time in kernels bound by either; they add up.

    `device` is when the device is done with the last kernel, the gaps between kernels included; `host` is when the host
    has issued the last call, its `waits` for the device included. What is exchanged goes on next to both; all of them
    wait for what is `alone`.
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
        """The longest of what goes on at once, and what does not."""
        return max(self.device, self.host, self.communication) + self.alone

    @property
    def bound_by(self) -> str:
        """compute, memory, communication or host: whichever the step waits for most."""
        device = {"compute": self.compute, "memory": self.memory, "communication": self.communication + self.alone}
        if self.host - self.waits > sum(device.values()):
            return "host"
        return max(device, key=lambda name: device[name])


@dataclass
class _Timeline:
    """Where host, card and link stand, in seconds since the step began."""

    card: GPUParams
    efficiency: Efficiency
    host: float
    done: float = 0.0
    """When the card has worked through all that was issued."""
    link: float = 0.0
    """When the last exchange between cards ends."""
    gathered: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0
    waits: float = 0.0
    update: float = 0.0

    def wait(self) -> None:
        """The host reads a value."""
        self.waits += max(0.0, self.done - self.host)
        self.host = max(self.host, self.done)

    def exchange(self, operation: Operation) -> None:
        """Cards exchange: one after the other, as soon as what is sent is there."""
        stops = operation.name == EXCHANGE
        share = self.efficiency.card_link if stops else self.efficiency.card_link_beside
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
        """Host and card exchange, next to all else."""
        rate = self.card.host_link_bytes_per_second or math.inf
        self.communication += operation.bytes / (rate * self.efficiency.link)

    def compute_kernel(self, operation: Operation, arithmetic: float, traffic: float) -> None:
        """The card runs a kernel."""
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
    """Time of `operations` issued one after the other to `card`. Raises ValueError where its rates are not known."""
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        raise ValueError(f"the rates of {card.name} are not known")
    line = _Timeline(card, efficiency, host=costs.step)
    known: dict[Operation, tuple[float, float, float]] = {}  # blocks are alike, so most calls were seen before
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
    """`step` with `times` more micro batches, when `one_more` is the same step with one more."""
    return StepTime(
        **{
            item.name: getattr(step, item.name) + times * (getattr(one_more, item.name) - getattr(step, item.name))
            for item in fields(StepTime)
        }
    )

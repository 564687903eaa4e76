"""Host speed: seconds of the five most frequent kinds of call in a step, on tensors of eight elements.

No card is needed: the calls use the same Python, dispatcher and autograd code with which a step launches kernels. A
plan uses the ratio of these times to those of the host on which its model was fitted (`REFERENCE`).

A virtual processor alternates every few seconds between two speeds that differ by a factor of 1.7 (three machines with
an H200, 2026-11-29), as its neighbor on the same core works or rests. Minimum times, measured one kind after the other,
gave 1.69 for Python and 0.92 for operators on one machine; on another 1.6 for all kinds and 20 s later 0.96. So the
kinds are measured in turn over many seconds and averaged: a training step also sees both speeds.
"""

import time
from collections.abc import Callable, Mapping
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from framework.activity import now
from framework.schema.gpu import HostParams

CALLS, GRAPHS = 100, 4
"""Calls per measurement (half a millisecond), and calls of a compiled graph."""
SLICES, SLICE_SECONDS = 15, 1.0
"""Number of time slices; each gives the median of every kind, and the plan uses their mean."""

REFERENCE: Mapping[str, float] = {
    "python": 2.0e-6,
    "operator": 5.1e-6,
    "view": 2.06e-6,
    "backward": 6.3e-6,
    "graph": 65e-6,
}
"""Seconds of each kind on the host on which the times of `framework/memory/host_time.py` were fitted.

Measured on a host with an H200 (torch 2.11, 2026-11-29) and divided by 0.87, the median over ten steps of its time
relative to the fitted host's. `graph` is the mean of that machine (55e-6) and of another, on
which it took 1.39 times as much relative to the other kinds (three measurements, 2026-11-30)."""


class HostSpeed(NamedTuple):
    """`seconds` of one call of each kind, and the ratio of the slowest to the fastest time slice."""

    seconds: Mapping[str, float]
    variation: float


def probe_host(slices: int = SLICES) -> HostSpeed:
    """Measure for `slices` times SLICE_SECONDS, after a few seconds of compilation."""
    now("measuring the processor")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        leaf = torch.ones(8, requires_grad=True)
        modules, graph = _called_modules(leaf), _called_graph(leaf)
        timed: dict[str, Callable[[], float]] = {
            "python": lambda: _timed(modules) / CALLS,
            "operator": lambda: _timed(lambda: _chain(leaf)) / CALLS,
            "view": lambda: _timed(lambda: _views(leaf)) / CALLS,
            "backward": lambda: _of_backward(leaf),
            "graph": lambda: _timed(graph) / GRAPHS,
        }
        for call in timed.values():
            call()  # compiles and fills caches
        stretches = [_stretch(timed) for _ in range(slices)]
    finally:
        torch.set_num_threads(threads)
    seconds = {kind: mean(stretch[kind] for stretch in stretches) for kind in timed}
    speeds = [mean(stretch[kind] / seconds[kind] for kind in timed) for stretch in stretches]
    return HostSpeed(seconds, max(speeds) / min(speeds))


def _stretch(timed: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Median seconds of each kind, measured in turn during SLICE_SECONDS."""
    found = {kind: list[float]() for kind in timed}
    end = time.perf_counter() + SLICE_SECONDS
    while time.perf_counter() < end:
        for kind, call in timed.items():
            found[kind].append(call())
    return {kind: median(values) for kind, values in found.items()}


def shares_of(speed: HostSpeed) -> HostParams:
    """Times of this host relative to the reference's."""
    return HostParams(**{kind: speed.seconds[kind] / REFERENCE[kind] for kind in REFERENCE})


def _chain(leaf: Tensor) -> Tensor:
    """Run CALLS operators that autograd records."""
    value = leaf
    for _ in range(CALLS):
        value = value * 1.5
    return value


def _views(leaf: Tensor) -> None:
    for _ in range(CALLS):
        leaf.view(2, 4)


class _Plain(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value


def _called_modules(leaf: Tensor) -> Callable[[], object]:
    """CALLS calls of modules with one hook each, as checkpointing and offloading use."""
    module = _Plain()
    module.register_forward_hook(lambda *_: None)

    def call() -> None:
        for _ in range(CALLS):
            module(leaf)

    return call


def _called_graph(leaf: Tensor) -> Callable[[], object]:
    """GRAPHS calls of one compiled graph: guards and autograd node, without generated code."""
    graph = torch.compile(lambda value: (value * 2).sin(), backend="aot_eager", dynamic=False)

    def call() -> None:
        for _ in range(GRAPHS):
            graph(leaf)

    return call


def _of_backward(leaf: Tensor) -> float:
    """Seconds of one autograd node in backward."""
    end = _chain(leaf).sum()
    taken = _timed(end.backward)  # type: ignore[no-untyped-call, unused-ignore]
    leaf.grad = None
    return taken / CALLS


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

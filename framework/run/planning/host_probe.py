"""Speed of the host: seconds of five kinds of call that a step is full of, on tensors of eight elements.

No card is needed: the calls are the same Python, dispatcher and autograd with which a step launches kernels. What a
plan takes from them is their ratio to the host that its times were fitted on (`REFERENCE`).
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from framework.schema.gpu import HostParams

CALLS, GRAPHS, REPEATS = 100, 4, 100
"""Calls of one measurement (half a millisecond), of a graph, and measurements, of which the shortest counts: no other
process disturbed it."""

REFERENCE: Mapping[str, float] = {
    "python": 2.0e-6,
    "operator": 5.1e-6,
    "view": 2.06e-6,
    "backward": 6.3e-6,
    "graph": 55e-6,
}
"""Seconds of each kind on the host that the times of `framework/memory/host_time.py` were fitted on.

Measured next to an H200 (torch 2.11, 2026-11-29) and divided by 0.87: in the median of ten steps what that host took of
the time of the fitted one."""


def probe_host() -> dict[str, float]:
    """Seconds of one call of each kind; takes about ten seconds, most of them for torch's compiler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        leaf = torch.ones(8, requires_grad=True)
        return {
            "python": _shortest(_called_modules(leaf)),
            "operator": _shortest(lambda: _chain(leaf)),
            "view": _shortest(lambda: _views(leaf)),
            "backward": _of_backward(leaf),
            "graph": _shortest(_called_graph(leaf), GRAPHS),
        }
    finally:
        torch.set_num_threads(threads)


def shares_of(seconds: Mapping[str, float]) -> HostParams:
    """Times of this host as shares of the reference's."""
    return HostParams(**{kind: seconds[kind] / REFERENCE[kind] for kind in REFERENCE})


def _chain(leaf: Tensor) -> Tensor:
    """CALLS operators, each of which autograd records."""
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
    """CALLS calls of modules with a hook each, as a checkpoint and an offload have."""
    module = _Plain()
    module.register_forward_hook(lambda *_: None)

    def call() -> None:
        for _ in range(CALLS):
            module(leaf)

    return call


def _called_graph(leaf: Tensor) -> Callable[[], object]:
    """GRAPHS calls of one compiled graph: its guards and its node of autograd, without generated code."""
    graph = torch.compile(lambda value: (value * 2).sin(), backend="aot_eager", dynamic=False)

    def call() -> None:
        for _ in range(GRAPHS):
            graph(leaf)

    return call


def _shortest(call: Callable[[], object], calls: int = CALLS) -> float:
    """Seconds of one of so many calls, warm and undisturbed."""
    call()
    return min(_timed(call) for _ in range(REPEATS)) / calls


def _of_backward(leaf: Tensor) -> float:
    def seconds() -> float:
        end = _chain(leaf).sum()
        taken = _timed(end.backward)
        leaf.grad = None
        return taken

    seconds()
    return min(seconds() for _ in range(REPEATS)) / CALLS


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

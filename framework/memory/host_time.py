"""Host time of each recorded call: the cost of Python, torch's dispatcher, autograd and kernel launches.

The host issues calls one after the other, and the card executes them asynchronously. The cost of a call depends more on
the code that makes it than on the kernel: a torch operator, an autograd node, Python code that launches through triton
or bitsandbytes, a graph compiled by Inductor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from framework.memory.trace import (
    GATHER,
    GRAPH,
    MODULE,
    PREFETCH,
    RECOMPUTED,
    REDUCE,
    RESTORE,
    WAIT,
    Launcher,
    Operation,
)
from framework.schema.gpu import HostParams


@dataclass(frozen=True)
class HostCosts:
    """Seconds of host time by kind of call. Recomputation by a checkpoint also passes through its hooks."""

    module: float
    """Call of a module in forward, in Python."""
    recomputed_module: float
    forward: float
    """An operator that launches a kernel in forward, including its share of the surrounding Python code."""
    recompute: float
    backward: float
    """An autograd node that launches a kernel."""
    optimizer: float
    """An operator in the optimizer's step or the loss."""
    in_place: float
    """An operator in the optimizer's step that creates no tensor."""
    forward_view: float
    """An operator that launches nothing."""
    recompute_view: float
    backward_view: float
    unpack: float
    """Half of saving a tensor through hooks and restoring it, which shows as two RESTORE operations."""
    product: float
    """Extra time of a matrix product or attention call, in which cuBLAS or cuDNN selects an algorithm."""
    compiled: float
    """A kernel launched by generated code, without autograd or modules around it."""
    graph: float
    """Entering a compiled graph: guards, arguments, autograd node."""
    recomputed_graph: float
    """The same when a checkpoint recomputes it, with hooks for all tensors that the graph saves."""
    triton: float
    """A launch by triton's Python launcher, with the autograd function around it."""
    bitsandbytes: float
    """A product with quantized weights, including the Python code of bitsandbytes."""
    bitsandbytes_update: float
    """One parameter of a bitsandbytes optimizer, including the synchronization after it."""
    prefetch: float
    """Prefetching the pages of one state of a paged optimizer."""
    listed: float
    """One tensor of a foreach operator."""
    wait: float
    """Noticing that the device has finished, and reading a value."""
    step: float
    """Fixed cost of a step: batch, schedule, loss, norm, figures."""
    collective: float = 0.75e-3
    """One gather or reduction: FSDP2's hooks around a block, copies and allocations. Fitted to twelve sharded steps on
    two H200 (torch 2.11, 2026-11-28; tests/calibration/h200_sharded_step.json)."""

    def scaled(self, share: float) -> "HostCosts":
        """Costs of a host that needs this share of the time for everything."""
        return replace(self, **{item.name: share * getattr(self, item.name) for item in fields(self)})

    def of(self, host: HostParams) -> "HostCosts":
        """Costs of a measured host, each scaled by its kind of code."""
        kinds = {name: kind for kind, names in _KINDS.items() for name in names}
        return replace(self, **{name: getattr(host, kind) * getattr(self, name) for name, kind in kinds.items()})


FITTED = HostCosts(
    module=5.25e-6,
    recomputed_module=15.6e-6,
    forward=22.7e-6,
    recompute=12.8e-6,
    backward=21.2e-6,
    optimizer=29e-6,
    in_place=4.53e-6,
    forward_view=2.11e-6,
    recompute_view=13.4e-6,
    backward_view=2.98e-6,
    unpack=34.3e-6,
    product=17.5e-6,
    compiled=27.8e-6,
    graph=0.362e-3,
    recomputed_graph=0.684e-3,
    triton=0.232e-3,
    bitsandbytes=137e-6,
    bitsandbytes_update=90e-6,
    prefetch=38.2e-6,
    listed=3.33e-6,
    wait=23.7e-6,
    step=2.33e-3,
)
"""Fitted by `benchmarks/fit_step_time.py` to 117 steps of five machines with an H200, and to the host time of forward,
loss, backward and update in 26 host-bound steps of three more (torch 2.11, 2026-11). The level is that of the reference
host of `doctor --calibrate`; the hosts of the eight machines range from 0.79 to 1.4 of it."""


_KINDS: Mapping[str, tuple[str, ...]] = {
    "python": (
        *("module", "recomputed_module", "triton", "bitsandbytes", "bitsandbytes_update", "prefetch", "listed"),
        *("wait", "step", "collective"),
    ),
    "operator": ("forward", "recompute", "optimizer", "in_place", "product", "compiled"),
    "view": ("forward_view", "recompute_view", "backward_view", "unpack"),
    "backward": ("backward",),
    "graph": ("graph", "recomputed_graph"),
}
"""Kind of code in `gpu.host` -> the costs that it scales."""


def host_seconds(operation: Operation, costs: HostCosts) -> float:
    """Host time for issuing `operation`."""
    if operation.name == WAIT and operation.launcher is Launcher.BITSANDBYTES:
        return 0.0  # part of the update
    if operation.name == PREFETCH:
        return costs.prefetch * operation.tensors
    special = _SPECIAL.get(operation.name)
    again = operation.phase == RECOMPUTED
    if special is not None:
        return float(getattr(costs, special[again]))
    listed = costs.listed * (operation.tensors - 1)
    if operation.launcher is Launcher.TRITON:
        return costs.triton + listed
    if operation.launcher is Launcher.BITSANDBYTES:
        return costs.bitsandbytes_update if operation.phase == "optimizer_step" else costs.bitsandbytes
    if not operation.bytes:
        if operation.phase == "backward":
            return costs.unpack if operation.name == RESTORE else costs.backward_view
        return costs.recompute_view if operation.phase == RECOMPUTED else costs.forward_view
    if operation.launcher is Launcher.COMPILED:
        return costs.compiled
    return _torch_seconds(operation, costs) + listed + (costs.product if operation.flops else 0.0)


def _torch_seconds(operation: Operation, costs: HostCosts) -> float:
    if operation.phase in ("forward", "backward", RECOMPUTED):
        return float(getattr(costs, operation.phase))
    is_in_place = operation.phase == "optimizer_step" and operation.name.endswith("_")
    return costs.in_place if is_in_place else costs.optimizer


_SPECIAL: Mapping[str, tuple[str, str]] = {
    GRAPH: ("graph", "recomputed_graph"),
    MODULE: ("module", "recomputed_module"),
    WAIT: ("wait", "wait"),
    GATHER: ("collective", "collective"),
    REDUCE: ("collective", "collective"),
}
"""Name of an operation -> fields of HostCosts for a normal pass and for recomputation by a checkpoint."""

"""Seconds of the host for each recorded call: what Python, torch's dispatcher, autograd and a launch cost it.

The host issues calls one after the other; the card works through what was issued. What a call costs depends on the
code that makes it more than on the kernel: an operator of torch, a node of autograd, Python code that launches through
triton or bitsandbytes, a graph that Inductor has compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from framework.memory.trace import GATHER, GRAPH, MODULE, PREFETCH, RECOMPUTED, REDUCE, WAIT, Launcher, Operation
from framework.schema.gpu import HostParams


@dataclass(frozen=True)
class HostCosts:
    """Seconds of host time by kind of call. What a checkpoint computes again goes through its hooks as well."""

    module: float
    """Calling a module in forward, in Python."""
    recomputed_module: float
    forward: float
    """An operator that launches a kernel, in forward, its share of the Python code around it included."""
    recompute: float
    backward: float
    """A node of autograd that launches a kernel."""
    optimizer: float
    """An operator of the optimizer's step, or of the loss."""
    in_place: float
    """An operator of the optimizer's step that makes no tensor."""
    forward_view: float
    """An operator that launches nothing."""
    recompute_view: float
    backward_view: float
    unpack: float
    """Taking a tensor away through a checkpoint's hooks and handing it back, which shows as a `detach` in backward."""
    product: float
    """What a matrix product or an attention call takes longer than another operator: cuBLAS or cuDNN chooses."""
    compiled: float
    """A kernel that generated code launches, with neither autograd nor modules around it."""
    graph: float
    """Entering a graph of compiled code: its guards, its arguments, autograd's node."""
    recomputed_graph: float
    """The same where a checkpoint computes it again, with its hooks for all that the graph keeps."""
    triton: float
    """A launch through triton's launcher in Python, with the autograd function around it."""
    bitsandbytes: float
    """A product with quantized weights, with the Python code of bitsandbytes around it."""
    bitsandbytes_update: float
    """One parameter of an optimizer of bitsandbytes, with the wait that follows it."""
    prefetch: float
    """Asking for the pages of one state of a paged optimizer."""
    listed: float
    """One tensor of an operator over lists of tensors."""
    wait: float
    """Noticing that the device is done and reading a value."""
    step: float
    """What a step has once: batch, schedule, loss, norm, figures."""
    collective: float = 0.75e-3
    """One gather or reduction: FSDP2's hooks around a block, its copies and allocations. Fitted to twelve sharded steps
    on two H200 (torch 2.11, 2026-11-28; tests/calibration/h200_sharded_step.json)."""

    def scaled(self, share: float) -> "HostCosts":
        """The costs of a host that needs this share of the time for everything."""
        return replace(self, **{item.name: share * getattr(self, item.name) for item in fields(self)})

    def of(self, host: HostParams) -> "HostCosts":
        """The costs of a measured host, each scaled by the kind of code that it is."""
        kinds = {name: kind for kind, names in _KINDS.items() for name in names}
        return replace(self, **{name: getattr(host, kind) * getattr(self, name) for name, kind in kinds.items()})


FITTED = HostCosts(
    module=5.27e-6,
    recomputed_module=12.4e-6,
    forward=24e-6,
    recompute=11.8e-6,
    backward=19.1e-6,
    optimizer=27.2e-6,
    in_place=4.47e-6,
    forward_view=1.67e-6,
    recompute_view=12.6e-6,
    backward_view=3.34e-6,
    unpack=35.9e-6,
    product=18.8e-6,
    compiled=29e-6,
    graph=0.243e-3,
    recomputed_graph=1.17e-3,
    triton=0.188e-3,
    bitsandbytes=0.194e-3,
    bitsandbytes_update=74e-6,
    prefetch=34.9e-6,
    listed=3.32e-6,
    wait=21.6e-6,
    step=2.43e-3,
)
"""Fitted to 68 steps of four machines with an H200 and 49 of a fifth (torch 2.11, 2026-11), and to the seconds that the
host took for forward, loss, backward and update of 21 steps of two more, in which it alone decided
(benchmarks/results/step_time_phases_h200.json, which judges them by other rows). Each is the geometric mean of eight
hosts, which need 0.64 to 1.37 of it."""


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
"""Kind of code in `gpu.host` -> the costs that are of it."""


def host_seconds(operation: Operation, costs: HostCosts) -> float:
    """What issuing `operation` takes the host."""
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
            return costs.unpack if operation.name == "detach" else costs.backward_view
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
"""Name of an operation -> field of HostCosts in a pass, and where a checkpoint computes it again."""

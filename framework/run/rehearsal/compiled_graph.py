"""Memory and time of a graph as Inductor would run it, without generating code.

Inductor materializes inputs and outputs of library kernels, results of reductions, outputs of the graph, and
elementwise values that would inline too much; all others are computed inside each kernel that needs them. One kernel
computes values of as many elements that share an operand, and takes memory for all of them when it is launched.
Compared with an H100 and an H200: docs/evidence/planner.md. The order of kernels is the graph's, where Inductor may
move one to lower the peak.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from framework.run.rehearsal.kernels import count_bytes, tensors_in
from framework.run.rehearsal.tracker import Tracker

aten, prims = torch.ops.aten, torch.ops.prims
_REDUCTIONS = frozenset(
    {
        *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.var, aten.var_mean, aten.argmax),
        *(aten.prod, aten.any, aten.all, aten.logsumexp, aten._softmax, prims.sum, prims.amax, prims.var),
    }
)
_FUSED = frozenset(
    {
        *(aten._to_copy, aten.cat, aten.clone, aten.copy, aten.full, aten.full_like, aten.scalar_tensor, aten.where),
        *(aten.gather, aten.index, aten.constant_pad_nd, aten.slice_scatter, aten.select_scatter, aten.empty),
        *(aten.zeros_like, aten.repeat, aten.fill, aten.embedding, aten.arange),
    }
)
"""Operators without torch's tag `pointwise` that Inductor nevertheless inlines."""
_VIEWS = frozenset(
    {
        *(aten.view, aten.reshape, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.expand, aten.slice),
        *(aten.select, aten.unsqueeze, aten.squeeze, aten.alias, aten.split, aten.split_with_sizes, aten.detach),
        *(aten.as_strided, aten.unbind, aten.diagonal),
    }
)

_MOST_READS_OF_REUSED, _MOST_READS, _MOST_OPERATIONS = 4, 8, 30
"""What Inductor inlines at most (torch/_inductor/config.py: realize_reads_threshold, realize_acc_reads_threshold,
realize_opcount_threshold)."""


class Role(Enum):
    """How Inductor treats a node."""

    BOUNDARY = auto()
    """An input, an attribute or the output of the graph."""
    VIEW = auto()
    FUSED = auto()
    """Elementwise: computed inside the kernels that read it."""
    REDUCTION = auto()
    LIBRARY = auto()
    """A separate kernel: a matrix product, attention, a sort."""


def role_of(node: fx.Node) -> Role:
    """How Inductor treats `node`, by its operator."""
    if node.op != "call_function":
        return Role.BOUNDARY
    packet = getattr(node.target, "_overloadpacket", None)
    if node.target is operator.getitem or packet in _VIEWS or getattr(node.target, "is_view", False):
        return Role.VIEW
    if packet in _REDUCTIONS:
        return Role.REDUCTION
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return Role.FUSED if packet in _FUSED or is_pointwise or str(packet).startswith("prims.") else Role.LIBRARY


class Schedule:
    """The nodes of a graph in order: which are materialized, what they read, and when values die."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.roles = {node: role_of(node) for node in self.nodes}
        self.written = self._find_written()
        self.operands = self._find_operands()
        self.kernels = self._join_kernels()
        # Position -> values whose last read is there.
        position = {node: index for index, node in enumerate(self.nodes)}
        position |= {node: position[kernel.writes[0]] for node, kernel in self.kernels.items()}
        last: dict[fx.Node, int] = {}
        deaths: dict[int, list[fx.Node]] = {}
        for node in reversed(self.nodes):
            uses = (last[user] if self.is_inlined(user) else position[user] for user in node.users)
            last[node] = max(uses, default=position[node])
            if node.op != "output":
                deaths.setdefault(last[node], []).append(node)
        self.deaths = deaths

    def _find_written(self) -> set[fx.Node]:
        written: set[fx.Node] = set()
        for node in reversed(self.nodes):
            read_whole = any(
                user.op == "output"
                or self.roles[user] is Role.LIBRARY
                or (self.roles[user] is Role.VIEW and user in written)
                for user in node.users
            )
            if read_whole or self.roles[node] in (Role.LIBRARY, Role.REDUCTION):
                written.add(node)
        return written

    def _find_operands(self) -> dict[fx.Node, set[fx.Node]]:
        """Materialized values that the kernel of each node reads, through inlined ones. Values that would inline too
        much are materialized."""
        operands: dict[fx.Node, set[fx.Node]] = {}
        inlined: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            read, inner = set[fx.Node](), set[fx.Node]()
            for source in node.all_input_nodes:
                read |= operands[source] if self.is_inlined(source) else {source}
                inner |= inlined[source]
            if self.roles[node] is Role.FUSED:
                inner = inner | {node}
                is_large = len(inner) + len(read) > _MOST_OPERATIONS
                is_reused = len(node.users) > 1 and len(read) > _MOST_READS_OF_REUSED
                if is_large or is_reused or len(read) > _MOST_READS:
                    self.written.add(node)
            operands[node] = read
            inlined[node] = inner if self.is_inlined(node) else set()
        return operands

    def is_inlined(self, node: fx.Node) -> bool:
        """Whether the value has no memory of its own: a view, or elementwise and not materialized."""
        return self.roles[node] is Role.VIEW or (self.roles[node] is Role.FUSED and node not in self.written)

    def _join_kernels(self) -> dict[fx.Node, "Kernel"]:
        """Group materialized elementwise values and row reductions that one pass over the same elements computes."""
        kernels: dict[fx.Node, Kernel] = {}
        open_kernels: list[Kernel] = []
        for node in self.nodes:
            if node not in self.written or self.roles[node] not in (Role.FUSED, Role.REDUCTION):
                continue
            operands = self.operands[node]
            kernel = next((item for item in reversed(open_kernels) if item.can_take(node, operands, kernels)), None)
            if kernel is None:
                kernel = Kernel(len(open_kernels), _iterations(node))
                open_kernels.append(kernel)
            kernel.take(node, operands)
            kernels[node] = kernel
        return kernels


class Kernel:
    """One generated kernel: the values that it writes and reads, over `iterations` elements."""

    def __init__(self, number: int, iterations: int) -> None:
        self.number = number
        self.iterations = iterations
        self.writes: list[fx.Node] = []
        self.reads: set[fx.Node] = set()

    def can_take(self, node: fx.Node, operands: set[fx.Node], kernels: Mapping[fx.Node, "Kernel"]) -> bool:
        """Whether `node` iterates over the same elements, shares an operand, and needs nothing computed later."""
        if _iterations(node) != self.iterations or not (operands & self.reads or operands & set(self.writes)):
            return False
        return all(
            source.op == "placeholder" or (source in kernels and kernels[source].number <= self.number)
            for source in operands
            if source not in self.reads
        )

    def take(self, node: fx.Node, operands: set[fx.Node]) -> None:
        self.reads |= operands - set(self.writes)
        self.writes.append(node)

    @property
    def code(self) -> tuple[Any, ...]:
        """What tells its generated code from another kernel's: last operators and shapes."""
        shapes = (tuple(value.shape) for node in self.reads for value in tensors_in(node.meta.get("val")))
        return tuple((node.target, *node.meta["val"].shape) for node in self.writes), tuple(sorted(shapes))

    @property
    def bytes(self) -> int:
        """Bytes of the values that it writes or reads, each once."""
        return sum(_count_bytes(node) for node in (*self.writes, *self.reads))


def _iterations(node: fx.Node) -> int:
    """Elements that the kernel of `node` iterates over; unique for a column sum, which is never fused."""
    if role_of(node) is not Role.REDUCTION:
        return _elements(node)
    source = node.all_input_nodes[0]
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else [-1]
    rank = source.meta["val"].dim()
    along_rows = rank > 0 and all(isinstance(dim, int) and dim % rank == rank - 1 for dim in dims)
    return _elements(source) if along_rows else -_elements(source)


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _count_bytes(node: fx.Node) -> int:
    return sum(map(count_bytes, tensors_in(node.meta.get("val"))))


def _without_values(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class GraphReplay:
    """Replay of a graph as Inductor's code would run it, on tensors without storage; called by AOTAutograd.

    With `is_backward` tensors saved by forward may be overwritten. `tracker` returns None while nothing is recorded.
    """

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, tracker: Callable[[], Tracker | None], is_backward: bool) -> None:
        self._module = module
        self._tracker = tracker
        self._is_backward = is_backward
        self._schedule = Schedule(module.graph)

    def __call__(self, arguments: list[Any]) -> list[Any]:
        inputs = arguments[::-1]
        arguments.clear()  # these are the last references to tensors saved by forward
        tracker = self._tracker()
        code = contextlib.nullcontext() if tracker is None else tracker.compiled_code(not self._is_backward)
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes(), code:
            return self._replay(inputs, tracker)

    def _replay(self, inputs: list[Any], tracker: Tracker | None) -> list[Any]:
        values: dict[fx.Node, Any] = {}
        for position, node in enumerate(self._schedule.nodes):
            if node.op == "placeholder":
                values[node] = inputs.pop()
            elif node.op == "get_attr":
                values[node] = getattr(self._module, str(node.target))
            elif node.op == "output":
                return list(fx.node.map_arg(node.args[0], lambda item: values[item]))
            elif (kernel := self._schedule.kernels.get(node)) is None:
                values[node] = self._run(node, values, tracker)
            elif node is kernel.writes[0]:
                self._launch(kernel, position, values, tracker)
            for dead in self._schedule.deaths.get(position, ()):
                values.pop(dead, None)
        raise AssertionError("a graph has an output")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any], tracker: Tracker | None) -> Any:
        """The value of a library call or view; None if it is not in memory."""
        schedule, role = self._schedule, self._schedule.roles[node]
        if role is not Role.LIBRARY and node not in schedule.written:
            return None
        args = fx.node.map_arg(node.args, lambda item: values[item])
        kwargs = fx.node.map_arg(node.kwargs, lambda item: values[item])
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        if role is Role.LIBRARY and tracker is not None:
            tracker.record_call(node.target, args, kwargs, result)
        return result

    def _launch(self, kernel: Kernel, position: int, values: dict[fx.Node, Any], tracker: Tracker | None) -> None:
        """Create the values that a generated kernel writes."""
        roles, writes = self._schedule.roles, kernel.writes
        is_elementwise = all(roles[node] is Role.FUSED for node in writes)
        if tracker is not None:
            for node in writes:
                if roles[node] is Role.FUSED:
                    self._release_overwritten(node, position, values, tracker)
        for node in writes:
            values[node] = tree_map_only(torch.Tensor, _without_values, node.meta["val"])
        if tracker is not None:
            results = tensors_in([values[node] for node in writes])
            tracker.record_kernel(results, kernel.bytes, (id(self), kernel.code) if is_elementwise else None)

    def _release_overwritten(self, node: fx.Node, position: int, values: dict[fx.Node, Any], tracker: Tracker) -> None:
        """Release an operand that Inductor overwrites: one of the same size with no further reader."""
        size = _count_bytes(node)
        dying = [item for item in self._schedule.deaths.get(position, ()) if isinstance(values.get(item), torch.Tensor)]
        for item in dying:
            is_saved = self._is_backward and not item.name.startswith(("tangents", "primals"))
            storage = values[item].untyped_storage()
            if (item.op != "placeholder" or is_saved) and storage.nbytes() == size and tracker.knows(storage):
                address = storage._cdata
                for alias in dying:
                    if values[alias].untyped_storage()._cdata == address:
                        values[alias] = None
                return

"""Recorder of all allocations and frees of device memory while a step runs on tensors without storage.

A dispatch mode sees each operator after autograd; the storages it returns are the blocks of memory that the card would
hold. Kinds are assigned at birth by phase and shape, and corrected when more is known: a tensor that does not outlive
forward was a temporary, and `claim` identifies weights, gradients and optimizer states from the real objects.
"""

import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from framework.build.ranks import local_part
from framework.memory.trace import (
    EXCHANGE,
    GATHER,
    GRAPH,
    MODULE,
    RECOMPUTED,
    REDUCE,
    RESTORE,
    TRANSFER,
    WAIT,
    Kind,
    Launcher,
    Operation,
    Space,
    Trace,
)
from framework.memory.workspace import CUBLASLT_WORKSPACE
from framework.run.rehearsal import kernels
from framework.run.rehearsal.kernels import is_quantized_product, quantized_result, quantized_workspace
from framework.run.rehearsal.operations import operations_of, plain_result, updates_list
from framework.run.rehearsal.storage_blocks import Blocks
from framework.schema.gpu import GPUParams

aten = torch.ops.aten
_BETWEEN, _FORWARD, _LOSS, _BACKWARD, _OPTIMIZER = "end", "forward", "loss", "backward", "optimizer_step"
_HAS_LOGITS = ("forward", "backward", "eval")
_KEEPS_RESULTS = (_FORWARD, "eval", "start")
_PASSES = (_FORWARD, _LOSS, _BACKWARD, "eval", "start")


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode. `trace` is its record.

    `vocabulary`: tensors with this last dimension are logits. `padded`: whether the batch's attention mask has zeros or
    its rows hold several documents, which is the answer to `mask.all()` and similar checks.
    """

    def __init__(self, card: GPUParams, vocabulary: int = 0, padded: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = "load"
        self.read_values: list[str] = []
        self._card = card
        self._vocabulary = vocabulary
        self.padded = padded
        self._blocks = Blocks(self.trace)
        self._cublas_owners: set[tuple[bool, bool]] = set()  # (in backward, cuBLASLt's) of each allocated workspace
        self._resize = torch.UntypedStorage.resize_
        self._in_forward_code = False
        self._timed_kernels = set[Hashable]()
        self._launcher = Launcher.TORCH
        self.is_one_of_several = False
        """Whether tensors may be sharded."""
        self.steps_on_host = False
        """Whether the optimizer steps on weights, gradients and states in host memory."""
        self._communicates = False
        self._has_hooks = False
        """Whether a checkpoint or an offload keeps the tensors that this micro-batch saves."""
        self.stream = 0
        """The CUDA stream of new tensors, which are served by its allocator pool."""

    # -- calls from the step
    def observe(self, phase: str, empties_cache: bool = False) -> None:
        """Begin a phase of the step."""
        self.phase = phase
        self._has_hooks &= phase != _FORWARD
        self._blocks.begin_stretch()
        self.trace.enter(phase, empties_cache)

    def note_emptied_cache(self) -> None:
        """Record a call of torch.cuda.empty_cache()."""
        self.trace.enter(self.phase, empties_cache=True)

    def claim(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Set the kind of `tensors`; unknown ones are recorded as born now."""
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                block = self._track(local_part(tensor))
                if block is not None:
                    self.trace.kinds[block] = kind
                    self._blocks.is_known(block)

    def claim_elsewhere(self, tensor: torch.Tensor, kind: Kind, space: Space) -> None:
        """Record `tensor`, which takes no memory here, as one in a memory other than the device's."""
        storage = tensor.untyped_storage()
        if self._blocks.of(storage) is None:
            self._blocks.bind(storage, self._bear(tensor.numel() * tensor.element_size(), kind, space))

    def finish(self) -> Trace:
        """Stop recording and return the trace."""
        self._blocks.stop()
        return self.trace

    # -- storages
    def _track(self, tensor: torch.Tensor) -> int | None:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":
            return None
        block = self._blocks.of(storage)
        if block is None:
            block = self._bear(storage.nbytes(), self._guess_kind(tensor))
            self._blocks.bind(storage, block)
            if self.phase == _OPTIMIZER:
                self.trace.makers[block] = len(self.trace.operations)
        return block

    def _bear(self, size: int, kind: Kind, space: Space = Space.DEVICE) -> int:
        if self.steps_on_host and self.phase == _OPTIMIZER:
            space = Space.HOST
        block = self.trace.bear(size, kind, space, self.stream)
        if kind is Kind.ACTIVATIONS and self.phase in _KEEPS_RESULTS:
            self._blocks.may_be_temporary(block)
        return block

    def _guess_kind(self, tensor: torch.Tensor) -> Kind:
        phase = self.phase
        if self._communicates:
            return Kind.COMMUNICATION
        if phase == _LOSS or (tensor.dim() and tensor.shape[-1] == self._vocabulary and phase in _HAS_LOGITS):
            return Kind.LOGITS_AND_LOSS
        if phase in _KEEPS_RESULTS or phase == _BETWEEN:
            return Kind.ACTIVATIONS
        if phase == _BACKWARD:  # autograd runs without grad mode, recomputation of a checkpoint with it
            return Kind.ACTIVATIONS if self._recomputes() else Kind.TEMPORARIES
        return Kind.TEMPORARIES if phase == _OPTIMIZER else Kind.UNATTRIBUTED

    # -- several ranks
    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Mark tensors created within the block as communication buffers."""
        before, self._communicates = self._communicates, True
        try:
            yield
        finally:
            self._communicates = before

    def _exchange(self, packet: Any, args: tuple[Any, ...]) -> None:
        """Record the bytes that cross this card's link: a gather's result less its own shard, a reduction's input less
        its own share.

        An all-reduce is both (a ring). Exchanges within a pass that are not sharding's block the computation: keys and
        values under context parallelism, sums of partial results.
        """
        sizes = [sum(map(kernels.count_bytes, kernels.tensors_in((argument,)))) for argument in args[:2]]
        name, size = (GATHER if "gather" in packet.__name__ else REDUCE), abs(sizes[0] - sizes[1])
        size = size if sizes[1] else 2 * sizes[0]
        is_waited_for = not self._communicates and (sizes[1] or self.phase in _PASSES)
        name = EXCHANGE if is_waited_for else name
        self.trace.operations.append(Operation(name, self._operation_phase(), 0, size, ""))

    def send_to_host(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Record a move of `tensors` to pinned memory; the device's copies die."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            block = self._blocks.of(storage)
            if block is None or self.trace.spaces[block] is not Space.DEVICE:
                continue
            self._note_transfer(tensor)
            self._blocks.leave(block)
            self._blocks.bind(storage, self.trace.bear(self.trace.sizes[block], kind, Space.PINNED))

    def bring_from_host(self, size: int) -> int:
        """Record the arrival of `size` bytes on the device. Returns their block, which the caller ends."""
        self.trace.operations.append(Operation(TRANSFER, self._operation_phase(), 0, size, ""))
        return self._bear(size, Kind.COMMUNICATION)

    # -- compiled code
    @contextlib.contextmanager
    def compiled_code(self, of_forward: bool) -> Iterator[None]:
        """Mark operations within the block as a graph's; `of_forward` also for recomputation in backward."""
        before = self._launcher, self._in_forward_code
        self._launcher, self._in_forward_code = Launcher.COMPILED, of_forward
        self.trace.operations.append(Operation(GRAPH, self._code_phase(), 0, 0, ""))
        try:
            yield
        finally:
            self._launcher, self._in_forward_code = before

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is recorded."""
        return self._blocks.of(storage) is not None

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call of a library kernel with its result."""
        self._record(func, func._overloadpacket, args, kwargs, result)

    def record_kernel(self, results: Iterable[torch.Tensor], moved: int, timed: Hashable) -> None:
        """Record a launch of a generated kernel that moves `moved` bytes, and its results.

        Before its first launch torch times variants of the kernel that `timed` stands for (None: it has one variant),
        and each time overwrites a buffer as large as the L2 cache (`InductorBenchmarker.benchmark_gpu`).
        """
        for tensor in results:
            self._track(tensor)
        self.record_launch("generated", moved, Launcher.COMPILED)
        if timed not in (None, *self._timed_kernels) and self._card.name != "cpu":
            self._timed_kernels.add(timed)
            block = self._bear(self._card.l2_cache_bytes, Kind.TEMPORARIES)
            self.trace.bury(block)
            self.trace.unrepeated.add(block)

    def record_launch(self, name: str, moved: int, launcher: Launcher = Launcher.TRITON, tensors: int = 1) -> None:
        """Record a kernel launched by Python code, outside of torch's operators."""
        operation = Operation(name, self._operation_phase(), 0, moved, "", launcher=launcher, tensors=tensors)
        self.trace.operations.append(operation)

    def note_wait(self) -> None:
        """Record that the host waits for the device."""
        self.trace.operations.append(Operation(WAIT, self._operation_phase(), 0, 0, ""))

    def note_module(self) -> None:
        """Record the call of a module, unless a graph is being captured, when other modes are on top."""
        if _get_current_dispatch_mode() is self:
            self.trace.operations.append(Operation(MODULE, self._code_phase(), 0, 0, ""))

    # -- torch calls
    def __enter__(self) -> "Tracker":
        resize, tracker = self._resize, self

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._note_resize(storage, size)
            return result

        torch.UntypedStorage.resize_ = resize_and_record  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _note_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record `storage.resize_`, with which sharding frees and refills gathered weights; it is not an operator."""
        block = self._blocks.of(storage)
        if block is not None and self.trace.sizes[block] != size:
            self._blocks.leave(block)
            trace = self.trace
            born = trace.bear(size, trace.kinds[block], trace.spaces[block], trace.streams[block])
            self._blocks.bind(storage, born)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_one_of_several:
            if any(kind.__name__ == "DTensor" for kind in types):
                return NotImplemented  # a DTensor dispatches to operators on this rank's shard
            if active_fake_mode() is not None:
                return func(*args, **kwargs)  # global shapes, which torch computes in addition
        with torch._C.DisableTorchFunction():
            packet = func._overloadpacket
            if packet is aten.empty and kwargs.get("pin_memory"):
                return self._on_host(args[0], kwargs.get("dtype") or torch.get_default_dtype(), Space.PINNED)
            if packet in _READS:
                answer = self._answer(packet, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            result = plain_result(func, args, kwargs)
            if packet is aten._grouped_mm:
                result = kernels.grouped_product(*args)
            elif func is aten.addmm.dtype_out:  # torch 2.11 passes the dtype as `beta`
                result = kwargs["out"]
            elif result is None:
                result = quantized_result(packet, args, kwargs)
            if result is None and not updates_list(func, args):
                result = func(*args, **kwargs)
            self._record(func, packet, args, kwargs, result)
            return result

    def _record(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        events = len(self.trace.events)
        results = [result] if isinstance(result, torch.Tensor) else list(kernels.tensors_in(result))
        touched = results or list(kernels.tensors_in(args))
        if not touched or touched[0].device.type != "meta":
            return  # bookkeeping on the host, such as the step count of an optimizer
        inside = [self._bear(size, Kind.TEMPORARIES) for size in quantized_workspace(packet, args, kwargs)]
        # dropout allocates its mask first (Dropout.cu)
        for tensor in reversed(results) if packet is aten.native_dropout else results:
            self._track(tensor)
        for block in reversed(inside):
            self.trace.bury(block)
        if func.namespace == "c10d":
            self._exchange(packet, args)
            return
        made_memory = len(self.trace.events) > events
        if packet in _IN_PLACE_IN_BACKWARD and made_memory and self.phase == _BACKWARD and not torch.is_grad_enabled():
            self._blocks.note_update(packet, args, result)
        is_product = packet in kernels.MATRIX_PRODUCTS or is_quantized_product(packet)
        if not (made_memory or func._schema.is_mutable or is_product):
            phase = self._operation_phase()
            is_restored = packet is aten.detach and self._has_hooks and phase == _BACKWARD
            self.trace.operations.append(Operation(RESTORE if is_restored else packet.__name__, phase, 0, 0, ""))
            return
        if is_product:
            self.take_cublas_workspace(kernels.has_fused_bias(packet, args, kwargs))
        inside = kernels.workspace(packet, args, self._card, kwargs.get("dtype"))
        blocks = [self._bear(size, Kind.TEMPORARIES) for size in inside]
        for block in reversed(blocks):
            self.trace.bury(block)
        phase = self._operation_phase()
        self.trace.operations += operations_of(phase, self._launcher, packet, args, kwargs, results)

    def _operation_phase(self) -> str:
        """The phase, except that a checkpoint's recomputation in backward is marked: it is as slow as forward."""
        return RECOMPUTED if self.phase == _BACKWARD and self._recomputes() else self.phase

    def _code_phase(self) -> str:
        """The phase of a module's or a graph's call; in backward only a checkpoint calls them."""
        phase = self._operation_phase()
        self._has_hooks |= phase == RECOMPUTED
        return phase

    def _recomputes(self) -> bool:
        """Whether a checkpoint is recomputing forward."""
        return torch.is_grad_enabled() or self._in_forward_code

    def take_cublas_workspace(self, with_bias: bool = False) -> None:
        """Record cuBLAS's workspace per handle and stream; backward runs in its own thread with its own handle.

        A product that adds its bias uses cuBLASLt, which keeps another, small workspace.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        sizes = {False: self._card.cublas_workspace_bytes or 0}
        if with_bias and sizes[False]:
            sizes[True] = CUBLASLT_WORKSPACE
        for light, size in sizes.items():
            if size and (in_backward, light) not in self._cublas_owners:
                self._cublas_owners.add((in_backward, light))
                self.trace.bear(size, Kind.TEMPORARIES)

    # -- values that do not exist
    def _answer(self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answer an operator that reads device values on the host, or return NotImplemented to run it."""
        tensor = args[0]
        if packet is aten.equal:
            return True if tensor.device.type == "meta" else NotImplemented
        if packet is aten._to_copy:
            device = kwargs.get("device")
            if device is None or device.type != "cpu" or tensor.device.type != "meta":
                return NotImplemented
            if not kwargs.get("non_blocking"):
                self.note_wait()
            return self._on_host(tensor.shape, kwargs.get("dtype") or tensor.dtype, Space.HOST)
        if packet is aten.copy_:
            source = args[1]
            if tensor.device.type == "cpu" and source.device.type == "meta":
                self._note_transfer(tensor)
                if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                    self.note_wait()
                return tensor
            if tensor.device.type == "meta" and self._is_offloaded(source):
                self.claim([tensor], Kind.ACTIVATIONS)
                self._note_transfer(tensor)
                return tensor
            return NotImplemented
        if tensor.device.type != "meta":
            return NotImplemented
        self.read_values.append(str(packet))
        self.note_wait()
        if tensor.dtype == torch.bool or packet is aten.is_nonzero:
            return not self.padded
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _on_host(self, size: Sequence[int], dtype: torch.dtype, space: Space) -> torch.Tensor:
        """An expanded zero of the right shape: it takes no memory here, and its full size in the trace."""
        copy = torch.zeros((), dtype=dtype).expand(size)
        block = self.trace.bear(math.prod(size) * dtype.itemsize, Kind.ACTIVATIONS, space)
        self._blocks.bind(copy.untyped_storage(), block)
        return copy

    def _is_offloaded(self, tensor: torch.Tensor) -> bool:
        block, trace = self._blocks.of(tensor.untyped_storage()), self.trace
        return block is not None and (trace.spaces[block], trace.kinds[block]) == (Space.PINNED, Kind.ACTIVATIONS)

    def _note_transfer(self, tensor: torch.Tensor) -> None:
        self._has_hooks |= self.phase == _FORWARD  # where an offload sends what is saved
        self.trace.operations.append(Operation(TRANSFER, self._operation_phase(), 0, tensor.nbytes, ""))


_IN_PLACE_IN_BACKWARD = frozenset({aten.add, aten.index_put})
_READS = frozenset({aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten._to_copy, aten.copy_})

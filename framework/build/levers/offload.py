"""`training.activation_offload`: tensors that blocks keep for backward wait in host memory.

Copies run on a separate stream. Forward: while block i computes, the tensors of block i - 1 are copied to the host, and
their device memory is freed when the copy is done. Backward: while block i computes, those of block i - 1 are copied
back. So the device holds the tensors of two blocks. All device memory is allocated and freed on the compute stream, so
that the plan, which has no streams, sees the same. Own code; the idea is that of torchtune's OffloadActivations and of
Unsloth, which offloads the inputs of checkpointed blocks: a checkpointed block keeps nothing else.
"""

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from framework.build.launches import note_launch
from framework.build.place import Place
from framework.memory.trace import HOLD, Launcher


def could_not_pin(size: int, reason: str) -> str:
    """Message of the failure, which `tunesmith explain` recognizes."""
    return f"could not pin {size / 2**30:.2f} GiB of host memory ({reason})"


@contextlib.contextmanager
def pinning(size: int) -> Iterator[None]:
    """Context in which torch pins `size` bytes of host memory. CUDA's errors for failures ("invalid argument", "out of
    memory") look like the card's, so they are raised as a RuntimeError that names the cause; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_of_card = isinstance(error, torch.OutOfMemoryError)
        if is_of_card or "pin_memory" not in f"{last.name} {last.line}":
            raise
        raise RuntimeError(could_not_pin(size, str(error).partition("\n")[0])) from error


LEAST_BYTES = 1 << 20
"""Minimum bytes of an offloaded tensor; copying smaller ones costs more than it saves."""
_WEIGHT_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")
_MOST_CASTS = 3


class Kept:
    """One kept storage: on `device` before it is sent and after it is fetched, on `host` in between."""

    def __init__(self, flat: Tensor, host: Tensor, visit: "Visit") -> None:
        self.device: Tensor | None = flat
        self.host = host
        self.visit = visit


class Visit:
    """One forward pass of a block with its kept tensors, alive as long as autograd needs it."""

    def __init__(self) -> None:
        self.kept: list[weakref.ref[Kept]] = []
        self.departure: Any = None
        self.shard_loader: Any = None
        self.is_coming = self.is_back = False

    @property
    def alive(self) -> list[Kept]:
        return [kept for reference in self.kept if (kept := reference()) is not None]


@dataclass(frozen=True)
class Handle:
    """Object that autograd holds instead of a saved tensor: its storage and view."""

    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """Moves kept tensors of blocks to the host and back. `moved_bytes` counts bytes sent to the host."""

    def __init__(self, place: Place) -> None:
        self._place = place
        on_card = place.kind == "cuda" and not place.rehearsed
        self._side = torch.cuda.Stream(place.device) if on_card else None  # type: ignore[no-untyped-call]
        self._visits: list[weakref.ref[Visit]] = []
        self._leaving: Visit | None = None
        self._seen: dict[tuple[int, int, torch.dtype], Kept] = {}  # (storage, version, dtype) of this visit
        self._staying: set[int] = set()  # storages of weights, and of tensors that all blocks share
        self._visit = Visit()
        self._copies = 0
        self.moved_bytes = 0

    @contextlib.contextmanager
    def block(self, function: Callable[..., Any], is_last: bool) -> Iterator[None]:
        """Context of one block's forward pass; `function` has the block and its keywords bound to it."""
        self._visit = visit = Visit()
        self._visits = [reference for reference in self._visits if (old := reference()) is not None and old.alive]
        self._visits.append(weakref.ref(visit))
        self._staying = {tensor.untyped_storage()._cdata for tensor in _shared(function)}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._seen.clear()
        visit.departure = self._mark()
        self._let_go()
        self._leaving = visit
        if is_last:
            self._let_go()

    def _let_go(self) -> None:
        """Free the device memory of the previous block's tensors once their copies are done."""
        if self._leaving is not None:
            self._wait(self._leaving.departure)
            for kept in self._leaving.alive:
                kept.device = None
        self._leaving = None

    # -- forward
    def _pack(self, tensor: Tensor) -> Tensor | Handle:
        storage = tensor.untyped_storage()
        is_ours = type(tensor) is Tensor and tensor.device.type in (self._place.kind, self._place.device.type)
        is_whole = storage.nbytes() % tensor.element_size() == 0
        is_large = is_ours and is_whole and storage.nbytes() >= LEAST_BYTES
        if not is_large or storage._cdata in self._staying or _is_cast_weight(tensor):
            # Without detach a tensor would be part of a reference cycle, and an aborted pass would never be freed.
            return tensor.detach() if tensor.grad_fn is not None else tensor
        key = (storage._cdata, tensor._version, tensor.dtype)
        if key not in self._seen:
            self._seen[key] = self._send(tensor, storage.nbytes() // tensor.element_size())
        return Handle(self._seen[key], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _send(self, tensor: Tensor, elements: int) -> Kept:
        flat = tensor.detach().as_strided((elements,), (1,), 0)
        on_card = self._place.kind == "cuda"
        home = torch.device("cpu") if on_card else self._place.device
        with pinning(flat.nbytes):
            host = torch.empty(flat.shape, dtype=flat.dtype, device=home, pin_memory=on_card)
        with self._on_side():
            host.copy_(flat, non_blocking=True)
        self.moved_bytes += flat.numel() * flat.element_size()
        kept = Kept(flat, host, self._visit)
        self._visit.kept.append(weakref.ref(kept))
        return kept

    # -- backward
    def _unpack(self, saved: Tensor | Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._have_back(saved.kept.visit)
        assert saved.kept.device is not None
        return saved.kept.device.as_strided(saved.size, saved.stride, saved.offset)

    def _have_back(self, visit: Visit) -> None:
        """Ensure that the block's tensors are on the device, and start fetching those of the block before."""
        if visit.is_back:
            return
        self._fetch(visit)
        self._wait(visit.shard_loader)
        visit.is_back = True
        earlier = [other for reference in self._visits if (other := reference()) is not None]
        before = [other for other in earlier[: earlier.index(visit)] if other.alive]
        if before:
            self._fetch(before[-1])

    def _fetch(self, visit: Visit) -> None:
        if visit.is_coming:
            return
        visit.is_coming = True
        absent = [kept for kept in visit.alive if kept.device is None]
        for kept in absent:
            kept.device = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self._place.device)
        with self._on_side(len(absent)):
            for kept in absent:
                assert kept.device is not None
                kept.device.copy_(kept.host, non_blocking=True)
        visit.shard_loader = self._mark()

    # -- streams
    @contextlib.contextmanager
    def _on_side(self, copies: int = 1) -> Iterator[None]:
        """Context of copies that start after all queued work and overlap with work queued later."""
        self._copies += copies
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._place.device))
        with torch.cuda.stream(self._side):
            yield

    def _mark(self) -> Any:
        return self._side.record_event() if self._side is not None else self._copies

    def _wait(self, event: Any) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._place.device).wait_event(event)
        else:
            note_launch(HOLD, 0, Launcher.TORCH, tensors=self._copies - event)


def _shared(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors that are not offloaded: the block's weights, and keywords without gradients, such as masks and rotations,
    which the model shares between blocks. transformers binds the block as an argument, and before 5.2x as the owner of
    the method."""
    owner = getattr(getattr(function, "func", None), "__self__", None)
    for module in (owner, *getattr(function, "args", ())):
        if isinstance(module, nn.Module):
            yield from module.parameters()
            yield from module.buffers()
    for tensor in _tensors(getattr(function, "keywords", {}).values()):
        if not tensor.requires_grad:
            yield tensor


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _is_cast_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight in autocast's cache, which keeps it for the whole forward pass."""
    node: Any = tensor.grad_fn
    for _ in range(_MOST_CASTS):
        if node is None or node.name() not in _WEIGHT_CASTS:
            break
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)

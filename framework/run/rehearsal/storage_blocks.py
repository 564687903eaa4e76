"""Mapping of live storages to blocks of a trace: births, deaths, and gradient sums that a card makes in place."""

import weakref
from typing import Any

import torch

from framework.memory.trace import Kind, Trace

aten = torch.ops.aten


class Blocks:
    """The blocks of `trace` by live storage; a block dies with its storage."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._of: dict[int, int] = {}  # storage address -> block
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._births: dict[int, int] = {}  # block -> stretch of its birth, for blocks that may turn out temporary
        self._stretch = 0
        self._sums: dict[int, tuple[int, int]] = {}  # older gradient's block -> (sum's block, index of its birth)

    def of(self, storage: torch.UntypedStorage) -> int | None:
        """The block of `storage`; None if it is not recorded."""
        return self._of.get(storage._cdata)

    def bind(self, storage: torch.UntypedStorage, block: int) -> None:
        """Assign `block` to `storage`, with which it will die."""
        address = storage._cdata
        self._of[address] = block
        self._finalizers[block] = weakref.ref(storage, lambda _: self._release(address, block))

    def leave(self, block: int) -> None:
        """End `block` although its storage lives on, to be assigned another by `bind`."""
        self._finalizers.pop(block)
        self._trace.bury(block)

    def begin_stretch(self) -> None:
        """Begin a new stretch: blocks that are still alive are not temporary."""
        self._stretch += 1

    def may_be_temporary(self, block: int) -> None:
        """Mark `block` as temporary unless it outlives this stretch."""
        self._births[block] = self._stretch

    def is_known(self, block: int) -> None:
        """Fix the kind of `block`, which its death no longer changes."""
        self._births.pop(block, None)

    def stop(self) -> None:
        """Stop recording deaths."""
        self._finalizers.clear()

    def _release(self, address: int, block: int) -> None:
        self._finalizers.pop(block, None)
        if self._of.get(address) == block:
            del self._of[address]
        if self._births.pop(block, None) == self._stretch:
            self._trace.kinds[block] = Kind.TEMPORARIES
        if not self._reuse_for_sum(block):
            self._trace.bury(block)

    def note_update(self, packet: Any, args: tuple[Any, ...], total: torch.Tensor) -> None:
        """Note an update that autograd makes in place on a card, but out of place under any dispatch mode.

        These are `old + new` in InputBuffer::accumulate (torch/csrc/autograd/input_buffer.cpp), which adds into the
        older gradient if it holds the last reference to it and to its storage (never for a view, which shares its
        base's storage), and index_backward (FunctionsManual.cpp), which writes into fresh zeros. If `old` dies
        immediately, the sum is moved into its block.
        """
        old, new = args[0], args[1]
        if packet is aten.add and not (isinstance(new, torch.Tensor) and old.shape == new.shape):
            return
        if old._is_view() or old.shape != total.shape or old.dtype != total.dtype:
            return
        older, sum_block = self.of(old.untyped_storage()), self.of(total.untyped_storage())
        if older is not None and sum_block is not None and self._trace.events[-1] == sum_block:
            self._sums = {older: (sum_block, len(self._trace.events) - 1)}

    def _reuse_for_sum(self, older: int) -> bool:
        """If `older` dies right after the addition, move the sum into its block."""
        sum_block, index = self._sums.pop(older, (-1, -1))
        if sum_block < 0 or self._trace.sizes[sum_block] != self._trace.sizes[older]:
            return False
        reference = self._finalizers.get(sum_block)
        storage = reference() if reference is not None else None
        if storage is None or any(event >= 0 for event in self._trace.events[index + 1 :]):
            return False
        del self._trace.events[index]
        del self._finalizers[sum_block]
        self.bind(storage, older)
        return True

"""Packing of rows into packs of at most `model.model_max_length` tokens, by best-fit decreasing.

Each document of a pack is trained on as if it were alone. Positions restart at 0 in each document. Attention within
documents depends on the kernel: `eager` and `sdpa` get a mask, flex_attention its block mask, flash-attn the starts of
the documents. All of these are made here with transformers' own functions and not left to the model: some (GPT-OSS,
OPT, BERT in transformers 5.24) do not use `position_ids` when they make their mask, and would silently let documents
see each other. The result is verified in framework/build/loading/document_isolation.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from framework.build.data.rows import Row, Rows
from framework.build.text.labels import IGNORED

_ORDER_STREAM = 3
"""Stream of random numbers drawn from the run's seed, next to those of framework/build/data/prepare.py."""


@dataclass(frozen=True, eq=False)
class Packs(Sequence[Row]):
    """Rows in packs. Pack i holds the rows with indices `members[offsets[i]:offsets[i + 1]]`."""

    rows: Rows
    members: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return end_to_end([self.rows[member] for member in self.rows_of(index)])

    def rows_of(self, index: int) -> list[int]:
        """Indices of the rows in one pack."""
        index = range(len(self))[index]
        members: list[int] = self.members[self.offsets[index] : self.offsets[index + 1]].tolist()
        return members

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each pack, shape (packs,)."""
        return np.add.reduceat(self.rows.lengths[self.members], self.offsets[:-1])


def pack(rows: Rows, limit: int, seed: int, among: npt.NDArray[np.int64] | None = None) -> Packs:
    """Packs of at most `limit` tokens, of all rows or those `among` them; no row may be longer. A function of rows,
    limit and seed alone.

    The seed orders rows of the same length, so that neighbors in a file do not stay neighbors.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_ORDER_STREAM,))))
    shuffled = generator.permutation(np.arange(len(rows)) if among is None else among)
    longest_first = shuffled[np.argsort(-rows.lengths[shuffled], kind="stable")]
    packs = best_fit(rows.lengths, longest_first.tolist(), limit)
    offsets = np.zeros(len(packs) + 1, np.int64)
    np.cumsum([len(members) for members in packs], out=offsets[1:])
    return Packs(
        rows, np.fromiter((member for members in packs for member in members), np.int64, len(shuffled)), offsets
    )


def best_fit(lengths: npt.NDArray[np.int64], order: Sequence[int], limit: int) -> list[list[int]]:
    """Best-fit packing: each row, in `order`, goes into the fullest pack that it fits in, else into a new one.

    With rows from long to short at most 11/9 of the optimal number of packs (Johnson 1973). `open_with[room]` are packs
    with that much room; the bits of `rooms` say which of these lists are not empty, so that the best fit is found
    without a search.
    """
    packs: list[list[int]] = []
    open_with: list[list[int]] = [[] for _ in range(limit + 1)]
    rooms = 0
    for row in order:
        length = int(lengths[row])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = open_with[room].pop()
            rooms &= ~(1 << room) if not open_with[room] else -1
            packs[number].append(row)
        else:
            room, number = limit, len(packs)
            packs.append([row])
        if room > length:
            open_with[room - length].append(number)
            rooms |= 1 << (room - length)
    return packs


MARKS = ("position_ids", "cu_seq_lens", "longest_document")
"""Entries of a batch that mark its documents; `keep_documents_separate` turns them into arguments."""

HIDDEN = -65504.0
"""Added to masked scores: their weight is exactly 0 in every dtype. Not -inf, since with a whole tile of it some
versions of cuDNN lose the mask or return NaN; torch passes cuDNN this number too (attention.cpp)."""
ALIGNMENT = 8
"""Multiple to which the last dimension of an additive mask is padded (`preprocess_mask` in attention.cpp)."""


def end_to_end(rows: Sequence[Row]) -> Row:
    """The rows as documents of one row. The first token of each is not predicted from the previous document."""
    labels = [label for row in rows for label in (IGNORED, *row["labels"][1:])]
    ids = [token for row in rows for token in row["input_ids"]]
    return {"input_ids": ids, "labels": labels, "documents": [len(row["input_ids"]) for row in rows]}


def mark_documents(documents: Sequence[Sequence[int]], width: int) -> dict[str, Tensor]:
    """Entries of a batch that mark the documents in its rows; `documents` are their lengths, row by row.

    `position_ids`, int64 of shape (rows, width): 0, 1, .. in each document. `cu_seq_lens`, int32 of shape (documents +
    1,): the starts of the documents over all rows concatenated. `longest_document`, a scalar that stays on the host.
    The padding of a row counts as a document.
    """
    filled = [[*row, width - sum(row)] if sum(row) < width else list(row) for row in documents]
    flat = [length for row in filled for length in row]
    positions = np.concatenate([np.arange(length) for length in flat]).reshape(len(filled), width)
    return {
        "position_ids": torch.from_numpy(positions),
        "cu_seq_lens": torch.tensor([0, *accumulate(flat)], dtype=torch.int32),
        "longest_document": torch.tensor(max(flat)),
    }


def on_device(device: torch.device, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch on a device; scalars stay on the host."""
    return {name: tensor.to(device, non_blocking=True) if tensor.dim() else tensor for name, tensor in batch.items()}


def pinned(device: torch.device, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch in pinned memory, from which copies to a GPU are asynchronous. Only for a real GPU."""
    if device.type != "cuda":
        return dict(batch)
    waits = {name for name, tensor in batch.items() if tensor.dim() and tensor.device.type == "cpu"}
    return {name: tensor.pin_memory() if name in waits else tensor for name, tensor in batch.items()}


def document_lengths(batch: Mapping[str, Tensor]) -> tuple[tuple[int, ...], ...]:
    """Tokens of each document of each row, without padding. Reads values: for batches on the host."""
    found = []
    for index, row in enumerate(batch["input_ids"]):
        filled = int(batch["attention_mask"][index].sum()) if "attention_mask" in batch else len(row)
        positions = batch["position_ids"][index, :filled] if "position_ids" in batch else torch.arange(filled)
        starts = [*(positions == 0).nonzero().flatten().tolist(), filled]
        found.append(tuple(end - start for start, end in pairwise(starts)))
    return tuple(found)


def keep_documents_separate(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments that isolate the documents of a batch in this model; none if no row has several.

    The mask of `eager` and `sdpa` is [rows, 1, tokens, tokens], one for each kind of layer. sdpa's is made additive
    here once; otherwise every layer would convert it and keep its own copy.
    """
    if "position_ids" not in batch:
        return {}
    positions, kernel = batch["position_ids"], str(model.config._attn_implementation)
    if kernel.startswith("flash"):
        starts, longest = batch["cu_seq_lens"], int(batch["longest_document"])
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return {"position_ids": positions, **lengths}
    dtype = model.get_input_embeddings().weight.dtype
    shaped = torch.empty((*positions.shape, 0), dtype=dtype, device=positions.device)
    masks = create_masks_for_generate(model.config, shaped, None, None, position_ids=positions)
    if kernel == "sdpa":
        kinds = masks.items() if isinstance(masks, dict) else [("", masks)]
        additive = {kind: _additive(mask, dtype) for kind, mask in kinds}
        masks = additive if isinstance(masks, dict) else additive[""]
    return {"position_ids": positions, "attention_mask": masks}


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Additive form of a boolean mask, 0 or HIDDEN, in the dtype of attention.

    Its rows are aligned to ALIGNMENT, as the kernels need it; otherwise every layer would copy it.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    kind = "cpu" if mask.device.type == "cpu" else "cuda"
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    *lines, keys = mask.shape
    aligned = torch.zeros((*lines, -(-keys // ALIGNMENT) * ALIGNMENT), dtype=dtype, device=mask.device)
    return aligned[..., :keys].masked_fill_(mask.logical_not(), HIDDEN)

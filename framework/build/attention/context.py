"""Context parallelism: ranks take the same rows, and a part of each.

A row is cut into twice as many chunks as there are ranks in the group. Rank i takes chunks i and 2n - 1 - i: later
tokens see more keys, so every rank has the same work in causal attention. All other layers treat tokens separately,
with their positions. Labels are moved to the token that predicts them before the cut, so each rank's loss is the sum
over its tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.build.losses.loss import next_tokens
from framework.build.ranks import COLLECTIVE, Ranks
from framework.schema.choices import SdpaBackend
from framework.schema.config import TrainingConfig

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 gave both new names and warns of the old ones."""


@dataclass
class Context:
    """This rank's place in a context-parallel group of `size` ranks, and its collectives."""

    rank: int
    size: int
    group: Any = None
    """torch's process group of those ranks."""
    backend: SdpaBackend | None = None
    """The requested kernel."""
    calls: int = 0
    """Number of attention calls over the group."""

    def gather(self, part: Tensor) -> Tensor:
        """The tensors of all ranks of the group, concatenated in the first dimension."""
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        _gather(whole, part, self.group)
        return whole

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's part, in the first dimension, of the sum of a tensor over the group."""
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        _reduce(part, whole, group=self.group)
        return part

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch whose rows are a multiple of `2 x size` tokens long.

        It has `input_ids` and `labels`, `[rows, tokens / size]`; `next`, each token's target, which is no longer its
        neighbor's label; `positions`, `[1, tokens / size]`. There is no padding mask, since padding is on the right,
        where no supervised token sees it.
        """
        ids, labels = batch["input_ids"], batch["labels"]
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return {
            "input_ids": self._own(ids),
            "labels": self._own(labels),
            "next": self._own(next_tokens(batch)),
            "positions": self._own(positions),
        }

    def _own(self, tokens: Tensor) -> Tensor:
        """The two chunks of this rank, `[rows, tokens] -> [rows, tokens / size]`."""
        length, rest = divmod(tokens.shape[1], 2 * self.size)
        if rest:
            raise ValueError(f"{tokens.shape[1]} tokens are not a multiple of {2 * self.size}")
        starts = (self.rank * length, (2 * self.size - 1 - self.rank) * length)
        return torch.cat([tokens[:, start : start + length] for start in starts], 1)


def share_rows(config: TrainingConfig, ranks: Ranks) -> Context | None:
    """The context-parallel group of this rank; None if rows are not split. Every rank must call this.

    Groups are neighbors: ranks 0 to n - 1 take the first rows, and so on. The process group is separate even if it has
    all ranks: in FSDP's group, keys would wait for the weights of the next block.
    """
    size = config.context_size
    if size == 1:
        return None
    group, backend = None, config.model.sdpa_backend
    if ranks.world > 1:  # `check` needs only shapes
        group, _ = dist.new_subgroups(size, timeout=COLLECTIVE)  # type: ignore[no-untyped-call]
    kernel = None if backend is None else SdpaBackend(backend)
    return Context(ranks.rank % size, size, group, kernel)

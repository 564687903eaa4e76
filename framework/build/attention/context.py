"""Context parallelism: ranks that take the same rows, and of each row a part.

A row is cut in twice as many chunks as ranks share it. Rank i takes chunk i and chunk 2n - 1 - i: as later tokens see
more keys, every rank then has the same work in causal attention. All but attention looks at one token alone, with its
position. A label is moved to the token that predicts it before the cut, so each rank's loss is the sum over its tokens.
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
    """This rank, number `rank` of the `size` that share each row, and how it exchanges tensors with the others."""

    rank: int
    size: int
    group: Any = None
    """torch's process group of those ranks."""
    backend: SdpaBackend | None = None
    """The kernel that was asked for."""
    calls: int = 0
    """Attentions that were computed over all of them."""

    def gather(self, part: Tensor) -> Tensor:
        """The tensors of all these ranks, in their order, end to end in the first dimension."""
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        _gather(whole, part, self.group)
        return whole

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's part, in the first dimension, of the sum of a tensor over these ranks."""
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        _reduce(part, whole, group=self.group)
        return part

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch whose rows are a multiple of `2 x size` tokens long.

        `input_ids` and `labels` as they were, `[rows, tokens / size]`; `next`, what each token has to predict, which
        its neighbours in the part no longer tell; `positions`, `[1, tokens / size]`. The mask of the padding is left
        out: padding is on the right, where nothing that counts sees it.
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
    """The ranks that share this rank's rows; None where each row is one rank's. Every rank must call this.

    They are neighbours: ranks 0 to n - 1 take the first rows, and so on. Their group is one of its own even where it
    has all ranks: in that of sharding, keys would wait for the weights of the next block.
    """
    size = config.context_size
    if size == 1:
        return None
    group, backend = None, config.model.sdpa_backend
    if ranks.world > 1:  # `check` looks at shapes alone
        group, _ = dist.new_subgroups(size, timeout=COLLECTIVE)  # type: ignore[no-untyped-call]
    kernel = None if backend is None else SdpaBackend(backend)
    return Context(ranks.rank % size, size, group, kernel)

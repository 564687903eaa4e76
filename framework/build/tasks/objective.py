"""What every task gives the one step: a loss, what it is a mean over, and what evaluation counts."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from framework.build.losses.loss import Batch, Observe


class Objective(Protocol):
    """What is minimised. All of it are sums over a micro batch, so how a global batch is split changes nothing.

    `unit` is what the loss is a mean over, in words.
    """

    @property
    def unit(self) -> str: ...

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Sum of the losses of the batch's terms, a float32 scalar; calls `observe("loss")` where the head begins."""
        ...

    def terms(self, batch: Batch) -> Tensor:
        """How many terms that sum has (supervised tokens, rows, pairs): a scalar int64 on the batch's device."""
        ...

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """What evaluation adds up over batches: `loss` and `terms`, and whatever `metrics` needs. Keeps no logits."""
        ...

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`eval_loss` and the task's own metrics, from the sums over all batches (float64, on the host)."""
        ...

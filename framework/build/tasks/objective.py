"""Protocol of objectives: the loss, its number of terms, and the sums of an evaluation."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from framework.build.losses.loss import Batch, Observe


class Objective(Protocol):
    """A training objective. All values are sums over a micro-batch, so the split of a global batch does not matter.

    `unit` names the terms that the loss is averaged over.
    """

    @property
    def unit(self) -> str: ...

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Sum of the losses of the batch's terms, a float32 scalar; calls `observe("loss")` where the head begins."""
        ...

    def terms(self, batch: Batch) -> Tensor:
        """Number of terms of that sum (supervised tokens, rows, pairs): a scalar int64 on the batch's device."""
        ...

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums for an evaluation: `loss`, `terms`, and whatever `metrics` needs. Keeps no logits."""
        ...

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`eval_loss` and the task's own metrics, from the sums over all batches (float64, on the host)."""
        ...

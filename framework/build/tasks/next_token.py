"""`sft` and `pretrain`: the next token, wherever a label says that it is supervised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from framework.build.losses.loss import Batch, Loss, Observe, supervised_tokens
from framework.build.losses.router_loss import RouterLoss


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the supervised tokens, over all logits at once or in chunks, as `loss` computes it.

    `routers` is the auxiliary loss of a mixture of experts. transformers adds it to the mean cross entropy of a batch;
    so of a micro batch it counts once for each supervised token, and a global batch has the mean of its micro batches'
    terms, weighted by their supervised tokens. Unlike the cross entropy, it depends on how a batch is split: the load
    is balanced within each micro batch.
    """

    loss: Loss
    routers: RouterLoss | None = None
    unit: str = "supervised tokens"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        if self.routers is None:
            return self.loss(model, batch, observe)
        with self.routers.watched(model) as seen:
            loss = self.loss(model, batch, observe)
        return loss + supervised_tokens(batch) * self.routers(seen, batch)

    def terms(self, batch: Batch) -> Tensor:
        return supervised_tokens(batch)

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        terms = supervised_tokens(batch)
        if self.routers is None:
            loss, correct = self.loss.counts(model, batch)
            return {"loss": loss, "terms": terms, "correct": correct}
        with self.routers.watched(model) as seen:
            loss, correct = self.loss.counts(model, batch)
        return {"loss": loss, "terms": terms, "correct": correct, "router_loss": terms * self.routers(seen, batch)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`eval_loss` is what is trained on, the router loss included; `perplexity` is of the cross entropy alone."""
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        routers = {"router_loss": means["router_loss"]} if "router_loss" in means else {}
        return {
            "eval_loss": means["loss"] + routers.get("router_loss", 0.0),
            "perplexity": math.exp(min(means["loss"], 700.0)),
            "token_accuracy": means["correct"],
            **routers,
        }

"""`sft` and `pretrain`: the next token, wherever a label says that it is learnt."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from framework.build.loss import Batch, Loss, Observe, supervised_tokens


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the supervised tokens, over all logits at once or in chunks, as `loss` computes it."""

    loss: Loss
    unit: str = "supervised tokens"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        return self.loss(model, batch, observe)

    def terms(self, batch: Batch) -> Tensor:
        return supervised_tokens(batch)

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        loss, correct = self.loss.counts(model, batch)
        return {"loss": loss, "terms": supervised_tokens(batch), "correct": correct}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        mean = float(sums["loss"] / sums["terms"])
        accuracy = float(sums["correct"] / sums["terms"])
        return {"eval_loss": mean, "perplexity": math.exp(min(mean, 700.0)), "token_accuracy": accuracy}

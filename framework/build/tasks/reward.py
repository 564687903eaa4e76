"""`reward`: one number for an answer, higher for the better one of each pair."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.losses.loss import Batch, Observe
from framework.build.tasks.preference import counting_pairs
from framework.build.tasks.rows import row_answers


@dataclass(frozen=True)
class BradleyTerry:
    """-log s(r_w - r_l) of the rewards of a pair: Bradley and Terry 1952, as Ouyang et al. 2022 (arXiv 2203.02155,
    equation 1) train reward models, with the pairs of a prompt counted one by one. The batch has all better answers
    first, then the worse ones in the same order. Where rows have a margin m, -log s(r_w - r_l - m), as for Llama 2
    (Touvron et al. 2023, arXiv 2307.09288, equation 2)."""

    unit: str = "pairs"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        rewards = row_answers(model, batch)
        observe("loss")
        better, worse = rewards[:, 0].chunk(2)
        return _losses(better, worse, batch).where(counting_pairs(batch), 0).sum()

    def terms(self, batch: Batch) -> Tensor:
        return counting_pairs(batch).sum()

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        better, worse = row_answers(model, batch)[:, 0].chunk(2)
        counting = counting_pairs(batch)
        found = {
            "loss": _losses(better, worse, batch),
            "terms": counting,
            "correct": better > worse,
            "rewards_chosen": better,
            "rewards_rejected": worse,
        }
        return {name: value.where(counting, 0).sum() for name, value in found.items()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        return {
            "eval_loss": means["loss"],
            "reward_accuracy": means["correct"],
            "reward_margin": means["rewards_chosen"] - means["rewards_rejected"],
            "rewards_chosen": means["rewards_chosen"],
            "rewards_rejected": means["rewards_rejected"],
        }


def _losses(better: Tensor, worse: Tensor, batch: Batch) -> Tensor:
    """Of each pair; `targets`, if there are any, are the margins."""
    margins = batch["targets"][:, 0].nan_to_num() if "targets" in batch else 0.0
    return -F.logsigmoid(better - worse - margins)

"""`preference`: better answers against worse ones, or single answers that are good or bad."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.build.losses.loss import Batch, Loss, Observe, ignore_phases
from framework.build.tasks.preference_losses import Answers, Judged, PairLoss, SingleLoss
from framework.build.tasks.reference import Reference, answer_sums, answer_tokens


@dataclass(frozen=True)
class _Asked:
    """The model that is trained and its reference, asked about the answers of a batch."""

    loss: Loss
    reference: Reference | None

    def answers(self, model: nn.Module, batch: Batch, observe: Observe) -> Answers:
        """The reference goes first: its activations are gone before the model keeps its own."""
        reference = self.reference(model, batch) if self.reference is not None else None
        sums = answer_sums(self.loss.log_probabilities(model, batch, observe))
        return Answers(sums, answer_tokens(batch).clamp(min=1), reference)


@dataclass(frozen=True)
class Pairs:
    """A loss over pairs; the batch has all better answers first, then the worse ones in the same order.

    A pair counts when both answers have supervised tokens.
    """

    asked: _Asked
    rule: PairLoss
    unit: str = "pairs"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        judged, _, _ = self._judge(model, batch, observe)
        return judged.losses.where(counting_pairs(batch), 0).sum()

    def terms(self, batch: Batch) -> Tensor:
        return counting_pairs(batch).sum()

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        judged, chosen, rejected = self._judge(model, batch, ignore_phases)
        assert judged.rejected_rewards is not None
        counting = counting_pairs(batch)
        found = {
            "loss": judged.losses,
            "terms": counting,
            "rewards_chosen": judged.rewards,
            "rewards_rejected": judged.rejected_rewards,
            "correct": judged.rewards > judged.rejected_rewards,
            "logps_chosen": chosen.sums,
            "logps_rejected": rejected.sums,
        }
        return {name: value.where(counting, 0).sum() for name, value in found.items()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        return {
            "eval_loss": means["loss"],
            "reward_accuracy": means["correct"],
            "reward_margin": means["rewards_chosen"] - means["rewards_rejected"],
            **{name: mean for name, mean in means.items() if name not in ("loss", "terms", "correct")},
        }

    def _judge(self, model: nn.Module, batch: Batch, observe: Observe) -> tuple[Judged, Answers, Answers]:
        answers = self.asked.answers(model, batch, observe)
        better, worse = (
            Answers(answers.sums.chunk(2)[half], answers.tokens.chunk(2)[half], _half(answers.reference, half))
            for half in (0, 1)
        )
        return self.rule(better, worse), better, worse


def _half(numbers: Tensor | None, half: int) -> Tensor | None:
    return numbers.chunk(2)[half] if numbers is not None else None


def counting_pairs(batch: Batch) -> Tensor:
    """Which pairs have supervised tokens in both answers, bool of shape `[pairs]`."""
    better, worse = (answer_tokens(batch) > 0).chunk(2)
    return better & worse


@dataclass(frozen=True)
class Singles:
    """A loss over single answers, whose target is 1 for a good one and 0 for a bad one."""

    asked: _Asked
    rule: SingleLoss
    unit: str = "answers"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        judged = self.rule(self.asked.answers(model, batch, observe), _good(batch))
        return judged.losses.where(_counting(batch), 0).sum()

    def terms(self, batch: Batch) -> Tensor:
        return _counting(batch).sum()

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        answers, good, counting = self.asked.answers(model, batch, ignore_phases), _good(batch), _counting(batch)
        judged = self.rule(answers, good)
        found = {"loss": judged.losses.where(counting, 0).sum(), "terms": counting.sum()}
        for name, group in (("chosen", good & counting), ("rejected", ~good & counting)):
            found[name] = group.sum()
            found[f"rewards_{name}"] = judged.rewards.where(group, 0).sum()
            found[f"logps_{name}"] = answers.sums.where(group, 0).sum()
        return found

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Of a kind of answers that there are none of, nothing is said."""
        found = {"eval_loss": float(sums["loss"] / sums["terms"])}
        for name in ("chosen", "rejected"):
            if float(sums[name]):
                found |= {kind: float(sums[kind] / sums[name]) for kind in (f"rewards_{name}", f"logps_{name}")}
        if "rewards_chosen" in found and "rewards_rejected" in found:
            found["reward_margin"] = found["rewards_chosen"] - found["rewards_rejected"]
        return found


def _good(batch: Batch) -> Tensor:
    return batch["targets"][:, 0] > 0.5


def _counting(batch: Batch) -> Tensor:
    return (answer_tokens(batch) > 0) & torch.isfinite(batch["targets"][:, 0])


def build_preference(loss: Loss, reference: Reference | None, rule: PairLoss | SingleLoss) -> Pairs | Singles:
    """The objective of one loss."""
    asked = _Asked(loss, reference)
    return Pairs(asked, rule) if isinstance(rule, PairLoss) else Singles(asked, rule)

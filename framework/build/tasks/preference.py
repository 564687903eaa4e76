"""Objectives of `preference` and `reward`: losses over pairs of a better and a worse answer, or over single answers.

Sums and means over an answer's tokens are float32. Rewards are defined up to a constant that is the same for both
answers of a pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.losses.loss import Batch, Loss, Observe, ignore_phases
from framework.build.tasks.reference import Reference, answer_sums, answer_tokens
from framework.build.tasks.rows import row_answers
from framework.schema.choices import PreferenceLoss
from framework.schema.objectives import DEFAULT_BETA, PreferenceParams


class Answers(NamedTuple):
    """Log-probabilities of answers under the trained model, and under its reference if there is one.

    All of shape `[answers]`: sums over the answer's tokens, and their number (at least 1).
    """

    sums: Tensor
    tokens: Tensor
    reference: Tensor | None = None

    @property
    def means(self) -> Tensor:
        """Log-probability a token."""
        return self.sums / self.tokens

    @property
    def ratios(self) -> Tensor:
        """Log-ratio of the answer's probability to that under the reference."""
        assert self.reference is not None, "losses with a reference are given one"
        return self.sums - self.reference


class Judged(NamedTuple):
    """Losses `[pairs]` and rewards of the better and worse answers; for single answers losses and rewards."""

    losses: Tensor
    rewards: Tensor
    rejected_rewards: Tensor | None = None


@dataclass(frozen=True)
class PairLoss:
    """A loss over pairs with its parameters."""

    params: PreferenceParams

    def __call__(self, chosen: Answers, rejected: Answers) -> Judged:
        rule = {
            PreferenceLoss.DPO: self._dpo,
            PreferenceLoss.IPO: self._ipo,
            PreferenceLoss.ORPO: self._orpo,
            PreferenceLoss.SIMPO: self._simpo,
        }[self.params.loss_type]
        return rule(chosen, rejected)

    @property
    def beta(self) -> float:
        return beta_of(self.params)

    def _dpo(self, chosen: Answers, rejected: Answers) -> Judged:
        """Rafailov et al. 2023 (arXiv 2305.18290), equation 7; with label smoothing e the conservative variant of
        Mitchell 2023 (ericmitchell.ai/cdpo.pdf), equation 3: -(1 - e) log s(m) - e log s(-m), m = b (r_w - r_l)."""
        rewards, others = self.beta * chosen.ratios, self.beta * rejected.ratios
        margin, smoothing = rewards - others, self.params.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margin)
        if smoothing:
            losses = losses - smoothing * F.logsigmoid(-margin)
        return Judged(losses, rewards, others)

    def _ipo(self, chosen: Answers, rejected: Answers) -> Judged:
        """Azar et al. 2023 (arXiv 2310.12036), equation 17: (r_w - r_l - 1 / 2b)^2, of ratios that are means over the
        answer's tokens, as TRL has them after its authors (huggingface.co/blog/pref-tuning, section on IPO)."""
        means = [answers.ratios / answers.tokens for answers in (chosen, rejected)]
        losses = (means[0] - means[1] - 1 / (2 * self.beta)).square()
        return Judged(losses, self.beta * means[0], self.beta * means[1])

    def _orpo(self, chosen: Answers, rejected: Answers) -> Judged:
        """Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7: the mean negative log-likelihood of the better
        answer, and beta (their lambda) x -log s(log odds_w - log odds_l) of mean likelihoods a token."""
        odds = [_log_odds(answers.means) for answers in (chosen, rejected)]
        losses = -chosen.means - self.beta * F.logsigmoid(odds[0] - odds[1])
        return Judged(losses, self.beta * chosen.means, self.beta * rejected.means)

    def _simpo(self, chosen: Answers, rejected: Answers) -> Judged:
        """Meng et al. 2024 (arXiv 2405.14734), equation 6: -log s(b (mean_w - mean_l) - gamma)."""
        rewards, others = self.beta * chosen.means, self.beta * rejected.means
        return Judged(-F.logsigmoid(rewards - others - self.params.simpo_gamma), rewards, others)


@dataclass(frozen=True)
class SingleLoss:
    """KTO with its reference point at 0, over single answers that are good (1) or bad (0).

    Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8: w_D (1 - s(b (r - z))) of good and w_U (1 - s(b (z - r))) of
    bad answers. There z is a running estimate of how far the model has moved from its reference, from answers to other
    prompts of the same micro-batch, and never below 0. Here z is 0, where it starts: an estimate would cost one more
    forward pass of both models, and make the loss depend on how a batch is split. This is TRL's `apo_zero_unpaired`
    (D'Oosterlinck et al. 2024, arXiv 2408.06266, equation 7 for single answers) with KTO's weights.
    """

    params: PreferenceParams

    def __call__(self, answers: Answers, good: Tensor) -> Judged:
        rewards = beta_of(self.params) * answers.ratios
        wanted = self.params.desirable_weight * torch.sigmoid(-rewards)
        unwanted = self.params.undesirable_weight * torch.sigmoid(rewards)
        return Judged(torch.where(good, wanted, unwanted), rewards)


def beta_of(params: PreferenceParams) -> float:
    """The written beta, or the loss's default."""
    return DEFAULT_BETA[params.loss_type] if params.beta is None else params.beta


def _log_odds(log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)). A certain answer has no odds: its probability is taken to be a little under 1."""
    below = log_probability.clamp(max=-1e-6)
    return below - torch.log(-torch.expm1(below))


@dataclass(frozen=True)
class _Asked:
    """Log-probabilities of a batch's answers under the model and its reference."""

    loss: Loss
    reference: Reference | None

    def answers(self, model: nn.Module, batch: Batch, observe: Observe) -> Answers:
        """The reference runs first, so its activations are freed before the model keeps its own."""
        reference = self.reference(model, batch) if self.reference is not None else None
        sums = answer_sums(self.loss.log_probabilities(model, batch, observe))
        return Answers(sums, answer_tokens(batch).clamp(min=1), reference)


class _OfPairs:
    """Terms and metrics of objectives over pairs."""

    unit: str = "pairs"

    def terms(self, batch: Batch) -> Tensor:
        return counting_pairs(batch).sum()

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        return {
            "eval_loss": means["loss"],
            "reward_accuracy": means["correct"],
            "reward_margin": means["rewards_chosen"] - means["rewards_rejected"],
            **{name: mean for name, mean in means.items() if name not in ("loss", "terms", "correct")},
        }


@dataclass(frozen=True)
class Pairs(_OfPairs):
    """A loss over pairs; the batch has all better answers first, then the worse ones in the same order.

    A pair counts when both answers have supervised tokens.
    """

    asked: _Asked
    rule: PairLoss

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        judged, _, _ = self._judge(model, batch, observe)
        return judged.losses.where(counting_pairs(batch), 0).sum()

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

    def _judge(self, model: nn.Module, batch: Batch, observe: Observe) -> tuple[Judged, Answers, Answers]:
        answers = self.asked.answers(model, batch, observe)
        better, worse = (
            Answers(
                answers.sums.chunk(2)[half],
                answers.tokens.chunk(2)[half],
                answers.reference.chunk(2)[half] if answers.reference is not None else None,
            )
            for half in (0, 1)
        )
        return self.rule(better, worse), better, worse


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
        """Metrics; a kind of answers that does not occur is left out."""
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


@dataclass(frozen=True)
class BradleyTerry(_OfPairs):
    """-log s(r_w - r_l) of the rewards of a pair: Bradley and Terry 1952, as Ouyang et al. 2022 (arXiv 2203.02155,
    equation 1) train reward models, with the pairs of a prompt counted one by one. The batch has all better answers
    first, then the worse ones in the same order. Where rows have a margin m, -log s(r_w - r_l - m), as for Llama 2
    (Touvron et al. 2023, arXiv 2307.09288, equation 2)."""

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        rewards = row_answers(model, batch)
        observe("loss")
        better, worse = rewards[:, 0].chunk(2)
        return _losses(better, worse, batch).where(counting_pairs(batch), 0).sum()

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


def _losses(better: Tensor, worse: Tensor, batch: Batch) -> Tensor:
    """Losses of the pairs; `targets`, if present, are margins."""
    margins = batch["targets"][:, 0].nan_to_num() if "targets" in batch else 0.0
    return -F.logsigmoid(better - worse - margins)

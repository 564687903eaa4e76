"""What preferences are worth to each published loss: losses and rewards from log-probabilities, one number an answer.

Sums and means over an answer's tokens are float32. Rewards are what the loss compares, up to what is the same for both
answers of a pair.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.schema.choices import PreferenceLoss
from framework.schema.preference import DEFAULT_BETA, PreferenceParams


class Answers(NamedTuple):
    """Log-probabilities of answers under the model that is trained, and under its reference where there is one.

    All of shape `[answers]`: sums over the answer's tokens, and how many these are (at least 1).
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
        """How much likelier the answer has become than it is to the reference, as a logarithm."""
        assert self.reference is not None, "losses with a reference are given one"
        return self.sums - self.reference


class Judged(NamedTuple):
    """Losses `[pairs]` and the rewards of the better and the worse answers; of single answers losses and rewards."""

    losses: Tensor
    rewards: Tensor
    rejected_rewards: Tensor | None = None


@dataclass(frozen=True)
class PairLoss:
    """A loss over pairs, with the numbers that it was asked for."""

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
    prompts of the same micro batch, and never below 0. Here z is 0, where it starts: an estimate would cost one more
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
    """The strength that was asked for, or the loss's own."""
    return DEFAULT_BETA[params.loss_type] if params.beta is None else params.beta


def _log_odds(log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)). A certain answer has no odds: its probability is taken to be a little under 1."""
    below = log_probability.clamp(max=-1e-6)
    return below - torch.log(-torch.expm1(below))

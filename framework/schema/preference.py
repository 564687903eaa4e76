"""`training.preference`: which loss is taken over better and worse answers, and what it is measured against."""

from typing import Annotated

from pydantic import Field

from framework.schema.choices import PreferenceLoss
from framework.schema.facts import NO_MEMORY, UsedWith
from framework.schema.params import Number, Params

Weight = Annotated[Number, Field(gt=0)]


def _read_by(*losses: PreferenceLoss) -> UsedWith:
    return UsedWith("training.preference.loss_type", losses, refused=True)


class PreferenceParams(Params):
    """The loss of `training.task: preference`."""

    loss_type: PreferenceLoss = PreferenceLoss.DPO
    """`dpo` and `ipo` learn from pairs, `kto` from single answers marked good or bad; all three are measured against a
    reference model, which costs nothing next to an adapter and a frozen copy of the weights otherwise. `orpo` and
    `simpo` learn from pairs without one."""
    beta: Annotated[Weight | None, NO_MEMORY] = None
    """How much a change of the log-probabilities counts (of `orpo`: the weight of its odds ratio). No memory. Unset:
    0.1, and 2 for `simpo`."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5), NO_MEMORY, _read_by(PreferenceLoss.DPO)] = 0.0
    """Share of pairs that are expected to be the wrong way round (`dpo`). No memory."""
    simpo_gamma: Annotated[Number, Field(ge=0), NO_MEMORY, _read_by(PreferenceLoss.SIMPO)] = 0.5
    """Margin that `simpo` wants between the two answers, in rewards. No memory."""
    desirable_weight: Annotated[Weight, NO_MEMORY, _read_by(PreferenceLoss.KTO)] = 1.0
    """Weight of good answers in `kto`. No memory."""
    undesirable_weight: Annotated[Weight, NO_MEMORY, _read_by(PreferenceLoss.KTO)] = 1.0
    """Weight of bad answers in `kto`. No memory."""
    precompute_reference: Annotated[bool, _read_by(PreferenceLoss.DPO, PreferenceLoss.IPO, PreferenceLoss.KTO)] = False
    """Compute the reference's log-probabilities of all rows once, before the first step, and keep them (4 bytes an
    answer) in the run folder: no copy of the weights, and no second forward pass in each step."""


DEFAULT_BETA = {loss: 2.0 if loss is PreferenceLoss.SIMPO else 0.1 for loss in PreferenceLoss}
"""TRL's; of SimPO the lower end of what its authors recommend (arXiv 2405.14734, 2.0 to 2.5)."""
WITHOUT_REFERENCE = (PreferenceLoss.ORPO, PreferenceLoss.SIMPO)

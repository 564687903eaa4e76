"""Settings of single tasks: the loss of preferences, and the teacher and loss of distillation."""

from typing import Annotated

from pydantic import Field

from framework.schema.choices import Attention, Divergence, PreferenceLoss, TorchDtype
from framework.schema.facts import NO_MEMORY, UsedWith
from framework.schema.params import FrozenMapping, Integer, Number, Params

Weight = Annotated[Number, Field(gt=0)]


def _read_by(*losses: PreferenceLoss) -> UsedWith:
    return UsedWith("training.preference.loss_type", losses, refused=True)


class PreferenceParams(Params):
    """The loss of `training.task: preference`."""

    loss_type: PreferenceLoss = PreferenceLoss.DPO
    """`dpo` and `ipo` train on pairs, `kto` on single answers marked good or bad; all three need a reference model,
    which costs nothing with an adapter and otherwise a frozen copy of the weights. `orpo` and `simpo` train on pairs
    without one."""
    beta: Annotated[Weight | None, NO_MEMORY] = None
    """Scale of the log-probability ratios (for `orpo` the weight of its odds ratio). No memory. Unset: 0.1, and 2 for
    `simpo`."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5), NO_MEMORY, _read_by(PreferenceLoss.DPO)] = 0.0
    """Expected share of pairs with swapped labels (`dpo`). No memory."""
    simpo_gamma: Annotated[Number, Field(ge=0), NO_MEMORY, _read_by(PreferenceLoss.SIMPO)] = 0.5
    """Target margin of `simpo` between the rewards of the two answers. No memory."""
    desirable_weight: Annotated[Weight, NO_MEMORY, _read_by(PreferenceLoss.KTO)] = 1.0
    """Weight of good answers in `kto`. No memory."""
    undesirable_weight: Annotated[Weight, NO_MEMORY, _read_by(PreferenceLoss.KTO)] = 1.0
    """Weight of bad answers in `kto`. No memory."""
    precompute_reference: Annotated[bool, _read_by(PreferenceLoss.DPO, PreferenceLoss.IPO, PreferenceLoss.KTO)] = False
    """Compute the reference's log-probabilities of all rows once, before the first step, and store them (4 bytes an
    answer) in the run folder: no copy of the weights and no second forward pass in each step."""


DEFAULT_BETA = {loss: 2.0 if loss is PreferenceLoss.SIMPO else 0.1 for loss in PreferenceLoss}
"""TRL's defaults; for SimPO the lower end of its authors' range (arXiv 2405.14734, 2.0 to 2.5)."""
WITHOUT_REFERENCE = (PreferenceLoss.ORPO, PreferenceLoss.SIMPO)


class TeacherParams(Params):
    """The model whose logits are the targets. It is loaded in addition to the student, frozen, and not part of
    checkpoints."""

    model_name: str | None = None
    """Hub id or local folder. If `architecture` is also set, planning needs no network."""
    architecture: FrozenMapping | None = None
    """A Hugging Face config written out, with the same vocabulary size as the student."""
    load_pretrained_weights: bool = True
    """false: random weights of `architecture`, to measure memory and time."""
    torch_dtype_str: TorchDtype | None = None
    """dtype of its weights: 4 bytes a weight in float32, 2 in bfloat16. Unset: the checkpoint's."""
    bits: Annotated[Integer, Field(multiple_of=4, ge=4, le=8)] | None = None
    """4 (nf4) or 8: bitsandbytes quantizes its linear layers as they load, to 0.56 or 1 byte a weight, but not
    embeddings, head and norms. Its logits then differ slightly, and its forward pass is slower. Unset: not
    quantized."""
    attn_implementation: Attention | None = None
    """Its attention kernel. Unset: `sdpa` if it supports it, else `eager`. It keeps no activations."""
    trust_remote_code: bool = False
    """Run Python code that comes with the teacher; a warning names it and its revision. Only for models that you would
    also install as a program. Set it in a recipe or on the command line; for a run's own config the command line must
    repeat it."""
    model_revision: str | None = None
    """Branch, tag or commit of a hub model."""


class DistillationParams(Params):
    """The loss of `training.task: distillation`."""

    divergence: Annotated[Divergence, NO_MEMORY] = Divergence.FORWARD_KL
    """`forward_kl` makes the student cover everything likely under the teacher, `reverse_kl` avoid everything unlikely,
    `jsd` is in between. No memory."""
    temperature: Annotated[Number, Field(gt=0), NO_MEMORY] = 1.0
    """Divisor of both models' logits: above 1 unlikely tokens count more. No memory."""
    alpha: Annotated[Number, Field(gt=0, le=1), NO_MEMORY] = 0.5
    """Weight of the divergence; the cross entropy of the labels has 1 - alpha. No memory."""

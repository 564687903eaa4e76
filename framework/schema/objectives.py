"""Settings of single tasks: a preference's loss, a distillation's teacher and how it is compared with."""

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


class TeacherParams(Params):
    """The model whose logits are the targets. It is loaded next to the trained one, never trained, and in no
    checkpoint."""

    model_name: str | None = None
    """Hub id or local folder. With `architecture` next to it, planning needs no network."""
    architecture: FrozenMapping | None = None
    """A Hugging Face config written out, with as many tokens in its vocabulary as the trained model has."""
    load_pretrained_weights: bool = True
    """false: random weights of `architecture`, to measure what a run takes."""
    torch_dtype_str: TorchDtype | None = None
    """dtype its weights are held in: 4 bytes a weight in float32, 2 in bfloat16. Unset: the checkpoint's."""
    bits: Annotated[Integer, Field(multiple_of=4, ge=4, le=8)] | None = None
    """4 (nf4) or 8: its linear layers are packed as they load, by bitsandbytes, to 0.56 or 1 byte a weight; embeddings,
    head and norms stay. What it says is a little other then, and its forward pass takes longer. Unset: not packed."""
    attn_implementation: Attention | None = None
    """Its attention kernel. Unset: `sdpa` where it supports it, else `eager`. It keeps no activations."""
    trust_remote_code: bool = False
    """Run Python code that comes with the teacher, said with its revision. Only for models you would also install as a
    program. Counts in a recipe and on the command line: where a run's config says it, the command line repeats it."""
    model_revision: str | None = None
    """Branch, tag or commit of a hub model."""


class DistillationParams(Params):
    """The loss of `training.task: distillation`."""

    divergence: Annotated[Divergence, NO_MEMORY] = Divergence.FORWARD_KL
    """`forward_kl` makes the student cover all that the teacher would say, `reverse_kl` avoid what it would not,
    `jsd` lies between. No memory."""
    temperature: Annotated[Number, Field(gt=0), NO_MEMORY] = 1.0
    """Both models' logits are divided by it: above 1 unlikely tokens count for more. No memory."""
    alpha: Annotated[Number, Field(gt=0, le=1), NO_MEMORY] = 0.5
    """Weight of the divergence; the labels' cross entropy has the rest. No memory."""

"""`training.teacher` and `training.distillation`: whose logits are the targets, and how they are compared."""

from typing import Annotated

from pydantic import Field

from framework.schema.choices import Attention, Divergence, TorchDtype
from framework.schema.facts import NO_MEMORY
from framework.schema.params import FrozenMapping, Integer, Number, Params


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

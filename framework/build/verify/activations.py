"""What the blocks really do: recomputation and attention."""

from collections.abc import Iterator

from framework.build.activations import checkpointed_blocks
from framework.build.assembly import Assembly
from framework.build.loss import causal_model
from framework.build.verify.reading import Reading


def read_checkpointed_blocks(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks recompute in train mode; none when it was not asked for."""
    done, blocks = checkpointed_blocks(assembly.model)
    key, asks = "training.enable_gradient_checkpointing", assembly.config.training.enable_gradient_checkpointing
    if asks and not blocks:
        yield Reading(key, "every block", "0/0", "this model class has no blocks that can be checkpointed")
    else:
        yield Reading(key, f"{blocks if asks else 0}/{blocks}", f"{done}/{blocks}", "blocks in train mode")


def read_attention_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that the model's own config dispatches to; whatever it chose is said when none was asked for."""
    found = causal_model(assembly.model).config._attn_implementation
    asked = assembly.config.model.attn_implementation
    yield Reading("model.attn_implementation", str(asked) if asked else None, str(found), "model.config")

"""What Liger's kernels do not go with."""

from collections.abc import Iterator

from framework.schema.choices import CheckpointingPolicy
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


def find_liger_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """They are closed to the compiler, and write over what a policy would keep."""
    training, key = config.training, "model.enable_liger_kernel"
    if config.model.enable_liger_kernel is not True:
        return
    if training.compile is True:
        message = "the compiler fuses the same work itself, and cannot see into Liger's kernels"
        yield Conflict((key, "training.compile"), message, "one of the two; compile=true is as fast")
    policy = training.gradient_checkpointing_policy
    if training.enable_gradient_checkpointing is True and policy is CheckpointingPolicy.SAVE_MATMULS:
        message = "Liger rotates queries and keys where their products were kept: they would be rotated twice"
        yield Conflict((key, "training.gradient_checkpointing_policy"), message, "full or save_attention")
    if config.model.chunked_loss is False:
        message = "its kernels are all but the loss: the logits are built in full"
        yield Conflict(("model.chunked_loss", key), message, "true, or unset", is_warning=True)

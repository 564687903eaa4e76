"""What backward keeps of forward: checkpointing of the transformer blocks."""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from framework.schema.training import TrainingParams


def checkpoint_blocks(training: TrainingParams, model: PreTrainedModel) -> None:
    """Recompute each block in backward instead of keeping its activations, when asked to."""
    if training.enable_gradient_checkpointing is True:
        # transformers 5.20 renamed the method; the positional mapping is the same in both
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(training.gradient_checkpointing_kwargs.model_dump())


def checkpointed_blocks(model: nn.Module) -> tuple[int, int]:
    """(blocks that recompute, blocks there are), read from the built model in train mode."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return sum(block.gradient_checkpointing and block.training for block in blocks), len(blocks)

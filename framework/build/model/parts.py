"""Parts of a model: itself without an adapter's wrapper, its blocks, and what runs before and after them."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without the adapter's wrapper."""
    unwrapped: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return unwrapped


def is_of_adapter(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter of an adapted model is the adapter's: trained, or an A matrix of LoRA that stays as drawn."""
    return parameter.requires_grad or ".lora_A." in name


def transformer_blocks(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The repeated blocks of the model, in the order they run."""
    return [module for module in causal_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def ends_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """What runs before the blocks and what runs after: the embedding, and the last norm with the head.

    Empty where they share weights, or where the order in which a class has its modules does not tell them.
    """
    causal = causal_model(model)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if embedding is None or head is None or not set(embedding.parameters()).isdisjoint(head.parameters()):
        return []
    for module in causal.modules():
        children = list(module.children())
        lists = [index for index, child in enumerate(children) if blocks[0] in list(child.children())]
        if lists and blocks[-1] in list(children[lists[0]].children()):
            after = [child for child in children[lists[0] + 1 :] if any(True for _ in child.parameters())]
            return [[embedding], [*after, head]] if after and embedding not in after and head not in after else []
    return []

"""Parts of a model: the base without an adapter's wrapper, its blocks, and the modules before and after them."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without the adapter's wrapper."""
    unwrapped: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return unwrapped


def is_of_adapter(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter of an adapted model belongs to the adapter: trained, or a frozen A matrix of LoRA."""
    return parameter.requires_grad or ".lora_A." in name


def transformer_blocks(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The transformer blocks, in execution order."""
    return [module for module in causal_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def ends_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Modules before the blocks (the embedding) and after them (the last norm and the head).

    Empty if they share weights, or if the modules of the class are not in execution order.
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

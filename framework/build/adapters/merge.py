"""Merging of an adapter into its base's weights."""

import warnings

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.quantize import dequantize, is_quantized


def merge(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """The plain model, in `dtype`, that computes the same as base and adapter together. Consumes `model`.

    A quantized base is dequantized first, because a merge into quantized weights would round the adapter away.
    """
    with warnings.catch_warnings():
        # peft reads a property that transformers 5.20 renamed; nothing a user could change
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if is_quantized(model):
            config, state = model.peft_config["default"], get_peft_model_state_dict(model)
            base = _unloaded(model)
            dequantize(base)
            config.init_lora_weights = True
            # quantized layers are never transposed
            config.fan_in_fan_out = any(isinstance(each, Conv1D) for each in base.modules())
            model = PeftModel(base, config, autocast_adapter_dtype=True)
            set_peft_model_state_dict(model, state)
    _lift_whole(model, trained=True)
    _part_adapted(model.get_base_model())
    with warnings.catch_warnings():
        # about tied weights, which `_part_adapted` and `untie_where_different` handle
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`", UserWarning)
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied", UserWarning)
        merged: PreTrainedModel = model.merge_and_unload()
    return finished(merged, dtype)


def detach(model: PeftModel) -> PreTrainedModel:
    """The base model without its adapter, in its own dtype. Consumes `model`."""
    return finished(model.get_base_model() if hasattr(model, "prompt_encoder") else _unloaded(model), None)


def finished(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model ready for saving: trainable, cast, and with the right setting for tied weights."""
    model._hf_peft_config_loaded = False  # otherwise save_pretrained looks for an adapter
    if dtype is not None:
        model.to(dtype)
    untie_where_different(model)
    return model


def untie_where_different(model: PreTrainedModel) -> None:
    """Mark head and embedding as untied if their weights differ, so that loading does not tie them again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _unloaded(model: PeftModel) -> PreTrainedModel:
    """The base without the adapter. peft 0.21 refuses to remove IA3 from a model that is marked as quantized, as it
    does for a merge."""
    _lift_whole(model, trained=False)
    attributes = vars(model.get_base_model())
    quantized = {
        name: attributes.pop(name) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if name in attributes
    }
    base: PreTrainedModel = model.unload()
    vars(base).update(quantized)
    return base


def _lift_whole(model: PeftModel, trained: bool) -> None:
    """Replace peft's wrappers of modules trained in full by the trained module or the original: peft 0.21 takes a block
    for one layer with a `weight` with IA3 or VeRA, and overwrites the original values."""
    for name, module in list(model.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save["default"] if trained else module.original_module)


def _part_adapted(model: PreTrainedModel) -> None:
    """Untie a head or embedding that has an adapter, since merging would otherwise change both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    for layer in (head, embedding):
        if isinstance(layer, BaseTunerLayer):
            base = layer.get_base_layer()
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)

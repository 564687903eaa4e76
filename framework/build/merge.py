"""An adapter goes into the weights that it was trained on."""

import warnings

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.quantize import dequantize, is_quantized


def merge(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """The plain model, in `dtype`, that computes what base and adapter compute together. Takes `model` apart.

    A quantised base is dequantised first, because a merge into packed weights would round the adapter away.
    """
    if is_quantized(model):
        model = _on_plain_weights(model)
    with warnings.catch_warnings():
        # of tied weights, which `untie_where_different` sees to
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied", UserWarning)
        merged: PreTrainedModel = model.merge_and_unload()
    return finished(merged, dtype)


def detach(model: PeftModel) -> PreTrainedModel:
    """The base model without its adapter, in the dtype that it is held in. Takes `model` apart."""
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "prompt_encoder") else model.unload()
    return finished(base, None)


def finished(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model as it can be written: trainable again, cast, and stating whether its head is still its embedding."""
    model._hf_peft_config_loaded = False  # else save_pretrained looks for an adapter
    if dtype is not None:
        model.to(dtype)
    untie_where_different(model)
    return model


def untie_where_different(model: PreTrainedModel) -> None:
    """A head trained apart from the embedding that it was tied to must not be tied again when it is loaded."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _on_plain_weights(model: PeftModel) -> PeftModel:
    config, state = model.peft_config["default"], get_peft_model_state_dict(model)
    base = model.unload()
    dequantize(base)
    config.init_lora_weights = True
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in base.modules())  # packed layers never are
    plain = PeftModel(base, config, autocast_adapter_dtype=True)
    set_peft_model_state_dict(plain, state)
    return plain

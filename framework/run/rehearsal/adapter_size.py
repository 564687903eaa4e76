"""Export size of an adapted run, read from the built model: the adapter, its base, or both merged."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from framework.build.adapters.adapter import MOVES_WEIGHTS, Adapter, adapter_state
from framework.build.adapters.quantize import scale_tensors, weight_count
from framework.build.assembly import Assembly
from framework.build.model.parts import is_of_adapter
from framework.build.ranks import local_part
from framework.schema.choices import PeftSaveMode

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of adapter dtypes in a safetensors header."""


def adapter_export_bytes(assembly: Assembly, adapter: Adapter, counts: Mapping[str, int]) -> int:
    """Bytes of the weights in the final folder. `counts` are the elements of each parameter, over all devices.

    Tokenizer and configs, a few megabytes at most, are not included.
    """
    model, mode = adapter.model, assembly.config.peft.peft_save_mode
    frozen = {name: item for name, item in model.named_parameters() if not is_of_adapter(name, item)}
    if mode is PeftSaveMode.MERGED:
        weights = sum(counts[name] for name in frozen) + _untied_weights(model.get_base_model())
        return weights * assembly.export_dtype.itemsize
    # not `state_dict()`: it reads values of nested scales, which a rehearsal does not have
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    unwritten = {
        f"{prefix}.{name}" for prefix, module in model.named_modules() for name in module._non_persistent_buffers_set
    }
    named = {name: assembly.as_part(name, tensor) for name, tensor in tensors.items() if name not in unwritten}
    written = dict(adapter_state(model, named))
    if mode is PeftSaveMode.ADAPTER_AND_BASE_MODEL:
        base = map(local_part, (*frozen.values(), *scale_tensors(model)))
        return file_bytes(written) + sum(item.numel() * item.element_size() for item in base)
    # `write_adapter` adds the inverse of its initialization
    is_moved = assembly.config.peft.peft_method in MOVES_WEIGHTS
    return file_bytes(written, ("lora_A", "lora_B") if is_moved else ())


def _untied_weights(model: PreTrainedModel) -> int:
    """Additional weights of a merged model whose head and embedding are no longer tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return 0
    one, other = (
        getattr(each, "original_module", getattr(each, "base_layer", each)).weight for each in (head, embedding)
    )
    has_adapter = isinstance(head, BaseTunerLayer) or isinstance(embedding, BaseTunerLayer)
    is_untied = one is other and (has_adapter or head.weight is not embedding.weight)
    return weight_count(one) if is_untied else 0


def file_bytes(tensors: Mapping[str, torch.Tensor], doubled: Sequence[str] = ()) -> int:
    """Bytes of a safetensors file with these tensors, including its header. Tensors with a part of `doubled` in their
    name are written with twice the rank."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # safetensors' order
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        shape, is_doubled = list(tensor.shape), any(part in name for part in doubled)
        if is_doubled:
            shape[0 if "lora_A" in name else 1] *= 2
        size = tensor.numel() * tensor.element_size() * (2 if is_doubled else 1)
        header[name] = {"dtype": _DTYPES.get(tensor.dtype, "F32"), "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + end

"""Record of how the base's weights arrive on a card.

What passes through the card decides where blocks settle: an adapter, quantized weights and their scales fill what was
just freed, and such a segment stays when the cache is emptied.
"""

import torch
from torch import Tensor, nn

from framework.build.adapters.quantize import is_quantized_weight, quantization_state, scale_tensors, weight_count
from framework.build.assembly import Assembly
from framework.build.model.parts import causal_model
from framework.memory.trace import Kind
from framework.run.rehearsal.tracker import Tracker
from framework.schema.choices import PeftMethod


def record_base(tracker: Tracker, assembly: Assembly) -> None:
    """Record the arrival of plain weights, then of each quantized one, before an adapter.

    Random weights are drawn on the card, a tied head with a matrix of its own, and those to be quantized move to the
    host (`quantize`).
    """
    quantized = _quantized_layers(assembly.model)
    passing: list[int] = []
    for weight in assembly.model.parameters():
        if weight in quantized:
            passing.append(_original_bytes(weight))
        elif assembly.adapter is None or not weight.requires_grad:
            tracker.claim([weight], Kind.WEIGHTS)
    if not assembly.config.model.load_pretrained_weights:
        _pass_together(tracker, [*passing, *_tied_head_bytes(assembly)])
        if passing:
            tracker.note_emptied_cache()
    for weight, layer in quantized.items():
        _quantize(tracker, weight, layer)
    if assembly.adapter is not None and assembly.config.peft.peft_method is PeftMethod.DORA:
        tracker.take_cublas_workspace()  # peft multiplies the factors for the norms it starts with


def _quantize(tracker: Tracker, weight: nn.Parameter, layer: nn.Module) -> None:
    """Record `_quantize` of Params4bit or Int8Params, and `quantize_4bit` (bitsandbytes 0.50)."""
    state, passing = quantization_state(weight), [_original_bytes(weight)]
    if state is not None and state.nested:
        passing += 2 * [state.absmax.numel() * torch.float32.itemsize]  # scales, and their distances from the mean
    blocks = [tracker.trace.bear(size, Kind.TEMPORARIES) for size in passing]
    tracker.claim([weight, *scale_tensors(layer)], Kind.WEIGHTS)
    for block in reversed(blocks):
        tracker.trace.bury(block)


def _pass_together(tracker: Tracker, sizes: list[int]) -> None:
    for block in [tracker.trace.bear(size, Kind.TEMPORARIES) for size in sizes]:
        tracker.trace.bury(block)


def _quantized_layers(model: nn.Module) -> dict[nn.Parameter, nn.Module]:
    owners = {module._parameters.get("weight"): module for module in model.modules()}
    return {weight: owner for weight, owner in owners.items() if weight is not None and is_quantized_weight(weight)}


def _original_bytes(weight: Tensor) -> int:
    """Bytes of a quantized weight's original on the card; to 8 bits it is quantized from float16."""
    state = quantization_state(weight)
    return weight_count(weight) * (torch.float16 if state is None else state.dtype).itemsize


def _tied_head_bytes(assembly: Assembly) -> list[int]:
    """Bytes of the head's own matrix, which tying frees."""
    model = causal_model(assembly.model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    return [embedding.weight.numel() * embedding.weight.element_size()] * is_tied

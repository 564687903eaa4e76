"""Sizes read from the built objects: what a checkpoint, an export and a load take, and the arithmetic of the model."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.quantize import packed_state, scale_tensors, weight_count
from framework.build.assembly import Assembly
from framework.build.levers.streamed_base import SLOTS
from framework.build.loading.sharded import is_sent, needs_whole_model
from framework.build.model.experts import chosen_and_available
from framework.build.model.parts import causal_model
from framework.build.optimizers.low_bit import is_managed, parts_of
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.ranks import local_part
from framework.build.tasks import WithFirstAdapter, WithoutAdapter, reference_of
from framework.memory.rehearsal import Footprint
from framework.memory.trace import Space
from framework.run.trained_parameters import trained_state
from framework.schema.choices import EmaDevice, OptimizerOffload


def held_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """What the device holds of the models, each once: parameters and buffers, what packed weights keep next to them,
    and the slots of a streamed base in place of its weights."""
    model, streamed = assembly.model, assembly.streamed
    elsewhere = streamed.parameters if streamed is not None else set()
    held = [parameter for parameter in model.parameters() if parameter not in elsewhere]
    slots = streamed.slots if streamed is not None else []
    return [*held, *model.buffers(), *scale_tensors(model), *slots, *frozen_model_tensors(assembly)]


def frozen_model_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """What the device holds of the frozen model next to the trained one."""
    frozen_model = assembly.frozen_model
    if frozen_model is None:
        return []
    return [*frozen_model.parameters(), *frozen_model.buffers(), *scale_tensors(frozen_model)]


def state_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """The optimizer's state tensors, which exist after its first step, and the average of the weights."""
    return [tensor for tensor, _ in placed_states(assembly)]


def placed_states(assembly: Assembly) -> list[tuple[torch.Tensor, Space]]:
    """The same, with where each stays between two steps."""
    return [
        (tensor, _average_space(assembly) if key == AVERAGE else _state_space(assembly, tensor))
        for state in assembly.optimizer.state.values()
        for key, value in state.items()
        for _, tensor in parts_of(value)
    ]


def _average_space(assembly: Assembly) -> Space:
    is_away = assembly.config.training.ema_device is EmaDevice.HOST and assembly.place.kind != "cpu"
    return Space.HOST if is_away or assembly.config.fsdp.is_on_host else Space.DEVICE


def _state_space(assembly: Assembly, tensor: torch.Tensor) -> Space:
    if is_managed(tensor):
        return Space.MANAGED
    if assembly.config.fsdp.is_on_host:
        return Space.HOST
    offload = assembly.config.training.optimizer_offload
    if offload is OptimizerOffload.NONE or not tensor.dim() or assembly.place.kind == "cpu":
        return Space.DEVICE
    return Space.PINNED if offload is OptimizerOffload.HOST else Space.DISK


def read_footprint(assembly: Assembly) -> Footprint:
    """Read the sizes. Call it after the optimizer has made its states."""
    named, counts = dict(assembly.model.named_parameters()), _counts(assembly)
    homes, on_cpu = assembly.streamed.homes if assembly.streamed is not None else [], assembly.place.kind == "cpu"
    offloads, held = assembly.config.fsdp.is_on_host, held_tensors(assembly)
    trained_products, frozen_products = count_product_weights(assembly.model)
    states = placed_states(assembly)
    return Footprint(
        total_parameters=sum(counts.values()),
        trainable_parameters=sum(counts[name] for name, item in named.items() if item.requires_grad),
        weight_sizes=() if offloads else _sizes([*held, *(homes if on_cpu else [])]),
        home_sizes=() if on_cpu else _sizes([*homes, *(held if offloads else [])]),
        trained_sizes=_sizes(trained_state(assembly.model).values()),
        state_sizes=_sizes(tensor for tensor, _ in states),
        state_spaces=tuple(space for _, space in states),
        export_bytes=_export_bytes(assembly, counts),
        trained_products=trained_products,
        frozen_products=frozen_products,
        shards=_shards(assembly),
        repeated_bytes=_repeated_bytes(assembly),
        streamed_bytes=_streamed_bytes(assembly),
        streamed_in_backward_bytes=assembly.streamed.bytes_in_backward if assembly.streamed is not None else 0,
        sent_bytes=_sent_bytes(assembly),
    )


def _counts(assembly: Assembly) -> dict[str, int]:
    """Weights of all devices, by the name of the parameter."""
    named = assembly.model.named_parameters()
    return {name: max(weight_count(item), assembly.numel(name, item)) for name, item in named}


def _shards(assembly: Assembly) -> int:
    shards = assembly.sharding.shards if assembly.sharding is not None else 1
    return shards * (assembly.tensor.size if assembly.tensor is not None else 1)


def _repeated_bytes(assembly: Assembly) -> int:
    """What a group that shares each matrix holds of everything else more than once."""
    tensor = assembly.tensor
    if tensor is None:
        return 0
    alike = [item for name, item in assembly.model.named_parameters() if name not in tensor.dimensions]
    states = [value for item in alike for value in assembly.optimizer.state.get(item, {}).values()]
    kept = [item for item in alike if item.requires_grad or assembly.adapter is None]
    held = sum(_sizes([*kept, *(value for value in states if isinstance(value, torch.Tensor))]))
    return held * (_shards(assembly) - _shards(assembly) // tensor.size)


def whole_bytes(assembly: Assembly) -> int:
    """Bytes of all weights as they are loaded: none split, none packed."""
    counts, plain = _counts(assembly), 0
    for name, parameter in assembly.model.named_parameters():
        state = packed_state(parameter)
        plain += counts[name] * (state.dtype.itemsize if state is not None else parameter.element_size())
    return plain


def _sent_bytes(assembly: Assembly) -> int:
    if not assembly.is_in_parts or needs_whole_model(assembly.config):
        return 0
    return whole_bytes(assembly) if is_sent(assembly.config, causal_model(assembly.model)) else 0


def _streamed_bytes(assembly: Assembly) -> int:
    """What crosses the link in a micro batch. A reference's forward pass leaves the last blocks in the slots, so that
    every block comes once more."""
    if assembly.streamed is None:
        return 0
    again = (
        isinstance(reference_of(assembly.objective), WithoutAdapter | WithFirstAdapter)
        and len(assembly.streamed.homes) > SLOTS
    )
    return assembly.streamed.bytes_per_micro_batch + (sum(map(len, assembly.streamed.homes)) if again else 0)


def _sizes(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each that this rank holds."""
    return tuple(local.numel() * local.element_size() for local in map(local_part, tensors))


def _export_bytes(assembly: Assembly, counts: Mapping[str, int]) -> int:
    """The weights of the final folder: a model in its checkpoint's dtype, an adapter as it is."""
    if assembly.adapter is None:
        return sum(counts.values()) * assembly.export_dtype.itemsize
    from framework.run.rehearsal.adapter_size import adapter_export_bytes  # peft takes seconds to import

    return adapter_export_bytes(assembly, assembly.adapter, counts)


def count_product_weights(model: nn.Module) -> tuple[int, int]:
    """(trained, frozen) weights that each token is multiplied with: the N of 6N and 4N FLOPs a token.

    An embedding is looked up, not multiplied, unless it is also the head. Of a mixture's experts a token meets some.
    """
    chosen, available = chosen_and_available(causal_model(model).config.get_text_config()) or (1, 1)
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        if id(parameter) in multiplied:
            counts[parameter.requires_grad] += weight_count(parameter)
        elif parameter.dim() == 3:  # the experts of one layer, stacked
            counts[parameter.requires_grad] += int(parameter.numel() * (chosen / available))
    return counts[True], counts[False]

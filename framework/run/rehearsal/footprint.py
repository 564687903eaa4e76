"""Sizes read from the built objects: checkpoint, export, load trace, and FLOPs of the model.

The trace of a load follows `caching_allocator_warmup` (transformers/modeling_utils.py) and
`convert_and_load_state_dict_in_model` (transformers/core_model_loading.py) of transformers 5.24. Pages of the mapped
files can be reclaimed by the system and are not counted.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.quantize import quantization_state, scale_tensors, weight_count
from framework.build.assembly import Assembly
from framework.build.levers.float8 import HELD
from framework.build.levers.streamed_base import SLOTS, StreamedBase
from framework.build.loading.model import embedding_rows, is_quantized_when_loaded
from framework.build.loading.sharded import is_sent, needs_whole_model
from framework.build.loading.vocabulary import changes_rows, token_matrices
from framework.build.model.experts import chosen_and_available
from framework.build.model.parts import causal_model, ends_of, transformer_blocks
from framework.build.optimizers.low_bit import is_managed, parts_of
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.ranks import local_part
from framework.build.tasks import reference_of
from framework.build.tasks.reference import WithFirstAdapter, WithoutAdapter
from framework.memory.trace import Footprint, Kind, Space
from framework.run.rehearsal.arrival import record_base
from framework.run.rehearsal.tracker import Tracker
from framework.run.state import trained_state
from framework.schema.choices import EmaDevice, Fp8, OptimizerOffload


def held_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """The models' tensors on the device, each once: parameters and buffers, extra tensors of quantized weights, and the
    slots of a streamed base instead of its weights."""
    model, streamed = assembly.model, assembly.streamed
    elsewhere = streamed.parameters if streamed is not None else set()
    held = [parameter for parameter in model.parameters() if parameter not in elsewhere]
    slots = streamed.slots if streamed is not None else []
    return [*held, *model.buffers(), *scale_tensors(model), *slots, *frozen_model_tensors(assembly)]


def frozen_model_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """Tensors of a frozen model (reference or teacher) on the device."""
    frozen_model = assembly.frozen_model
    if frozen_model is None:
        return []
    return [*frozen_model.parameters(), *frozen_model.buffers(), *scale_tensors(frozen_model)]


def state_tensors(assembly: Assembly) -> list[torch.Tensor]:
    """The optimizer's state tensors, which exist after its first step, and the averaged weights."""
    return [tensor for tensor, _ in placed_states(assembly)]


def placed_states(assembly: Assembly) -> list[tuple[torch.Tensor, Space]]:
    """The same with the place of each between two steps."""
    is_away = assembly.config.training.ema_device is EmaDevice.HOST and assembly.place.kind != "cpu"
    of_average = Space.HOST if is_away or assembly.config.fsdp.is_on_host else Space.DEVICE
    return [
        (tensor, of_average if key == AVERAGE else _state_space(assembly, tensor))
        for state in assembly.optimizer.state.values()
        for key, value in state.items()
        for _, tensor in parts_of(value)
    ]


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
    """Read the sizes, after the optimizer has created its states."""
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
    """Number of elements over all devices, by parameter name."""
    named = assembly.model.named_parameters()
    return {name: max(weight_count(item), assembly.numel(name, item)) for name, item in named}


def _shards(assembly: Assembly) -> int:
    shards = assembly.sharding.shards if assembly.sharding is not None else 1
    return shards * (assembly.tensor.size if assembly.tensor is not None else 1)


def _repeated_bytes(assembly: Assembly) -> int:
    """Bytes that a tensor-parallel group holds more than once, because only matrices are split."""
    tensor = assembly.tensor
    if tensor is None:
        return 0
    replicated = [item for name, item in assembly.model.named_parameters() if name not in tensor.dimensions]
    states = [value for item in replicated for value in assembly.optimizer.state.get(item, {}).values()]
    kept = [item for item in replicated if item.requires_grad or assembly.adapter is None]
    held = sum(_sizes([*kept, *(value for value in states if isinstance(value, torch.Tensor))]))
    return held * (_shards(assembly) - _shards(assembly) // tensor.size)


def whole_bytes(assembly: Assembly) -> int:
    """Bytes of all weights as loaded: not sharded, not quantized."""
    counts, plain = _counts(assembly), 0
    for name, parameter in assembly.model.named_parameters():
        state = quantization_state(parameter)
        plain += counts[name] * (state.dtype.itemsize if state is not None else parameter.element_size())
    return plain


def _sent_bytes(assembly: Assembly) -> int:
    if not assembly.is_in_parts or needs_whole_model(assembly.config):
        return 0
    return whole_bytes(assembly) if is_sent(assembly.config, causal_model(assembly.model)) else 0


def _streamed_bytes(assembly: Assembly) -> int:
    """Bytes of a streamed base that cross the link per micro-batch. A reference's forward pass leaves the last blocks
    in the slots, so that every block is sent once more."""
    if assembly.streamed is None:
        return 0
    again = (
        isinstance(reference_of(assembly.objective), WithoutAdapter | WithFirstAdapter)
        and len(assembly.streamed.homes) > SLOTS
    )
    return assembly.streamed.bytes_per_micro_batch + (sum(map(len, assembly.streamed.homes)) if again else 0)


def _sizes(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each tensor on this rank."""
    return tuple(local.numel() * local.element_size() for local in map(local_part, tensors))


def _export_bytes(assembly: Assembly, counts: Mapping[str, int]) -> int:
    """Bytes of the exported weights: a model in its checkpoint's dtype, an adapter unchanged."""
    if assembly.adapter is None:
        return sum(counts.values()) * assembly.export_dtype.itemsize
    from framework.run.rehearsal.adapter_size import adapter_export_bytes  # peft takes seconds to import

    return adapter_export_bytes(assembly, assembly.adapter, counts)


def count_product_weights(model: nn.Module) -> tuple[int, int]:
    """(trained, frozen) weights that each token is multiplied with: the N of 6N and 4N FLOPs per token.

    An embedding is a lookup, not a product, unless it is also the head. In a mixture of experts a token uses some of
    the experts.
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


LOADERS = 4
"""Threads that read tensors and copy them to the device (GLOBAL_WORKERS); one if they are quantized on arrival."""
SPARED_BY_WARMUP = int(1.2 * 2**30)
"""Bytes of the card that the first large request leaves free."""


def record_load(tracker: Tracker, assembly: Assembly) -> None:
    """Record the arrival of the weights and the emptying of the cache before the first step."""
    tracker.observe("load")
    copied = frozen_model_tensors(assembly)
    weights = held_tensors(assembly)[: -len(copied) or None]
    if assembly.streamed is not None:
        _stay_on_host(tracker, assembly.streamed)
    if assembly.is_in_parts:
        # Each unit is briefly whole before it is split (framework/build/loading/sharded.py). Layers are quantized one
        # by one as they are read, but random weights after the whole unit.
        if needs_whole_model(assembly.config):
            _pass(tracker, whole_bytes(assembly), Space.HOST)
        elif assembly.config.model.load_pretrained_weights:
            converted = (size for item, size in _weight_sizes(assembly).items() if _is_converted(assembly, item))
            _pass(tracker, max(converted, default=0), Space.HOST)
        _pass(tracker, largest_unit_bytes(assembly), Space.DEVICE)
    elif assembly.config.model.load_pretrained_weights and assembly.place.kind == "cuda":
        _read_checkpoint(tracker, assembly, weights)
    if assembly.config.fsdp.is_on_host:
        for part in map(local_part, weights):
            if isinstance(part, nn.Parameter) or part.is_floating_point():
                tracker.claim_elsewhere(part, Kind.WEIGHTS, Space.PINNED)
    else:
        if assembly.place.kind == "cuda" and not (assembly.is_in_parts or assembly.streamed):
            record_base(tracker, assembly)
        tracker.claim(weights, Kind.WEIGHTS)
    if assembly.config.training.teacher is not None and assembly.place.kind == "cuda":
        _pass(tracker, sum(tensor.numel() * tensor.element_size() for tensor in copied), Space.DEVICE)
    tracker.claim(copied, Kind.WEIGHTS)
    tracker.observe("end", empties_cache=True)
    tracker.observe("end")  # a separate mark: what is repeated later starts here and empties nothing


def _weight_sizes(assembly: Assembly) -> dict[nn.Parameter, int]:
    """Unsharded bytes of each parameter."""
    named = assembly.model.named_parameters()
    return {item: assembly.numel(name, item) * item.element_size() for name, item in named}


def largest_unit_bytes(assembly: Assembly) -> int:
    """Bytes of the largest unit while it is whole."""
    sharding = assembly.sharding
    blocks: Sequence[nn.Module] = transformer_blocks(assembly.model)
    if sharding is not None:
        blocks = [cast(nn.Module, block) for block in sharding.blocks]
    units = [*([block] for block in blocks), *ends_of(assembly.model, blocks)]
    sizes, is_read = _weight_sizes(assembly), assembly.config.model.load_pretrained_weights
    filled = [[item for module in unit for item in module.parameters()] for unit in units]
    in_units = {item for unit in filled for item in unit}
    filled.append([item for item in sizes if item not in in_units])
    return max(_whole_bytes(unit, sizes, is_read) for unit in filled)


def _is_converted(assembly: Assembly, weight: Tensor) -> bool:
    """Whether a tensor of a file is converted to another dtype, which happens on the host."""
    return weight.is_floating_point() and weight.dtype != assembly.export_dtype


def _whole_bytes(unit: Sequence[nn.Parameter], sizes: Mapping[nn.Parameter, int], is_read: bool) -> int:
    plain = [
        state.shape.numel() * state.dtype.itemsize for item in unit if (state := quantization_state(item)) is not None
    ]
    return sum(sizes[item] for item in unit) + (max(plain, default=0) if is_read else sum(plain))


def _stay_on_host(tracker: Tracker, streamed: StreamedBase) -> None:
    """Record the move of each block's weights into one buffer, during which one block at a time exists twice."""
    if streamed.place.kind == "cpu":
        tracker.claim(streamed.homes, Kind.WEIGHTS)
        return
    for home in streamed.homes:
        tracker.claim_elsewhere(home, Kind.WEIGHTS, Space.HOST)
    _pass(tracker, max(len(home) for home in streamed.homes), Space.HOST)


def _read_checkpoint(tracker: Tracker, assembly: Assembly, held: Sequence[Tensor]) -> None:
    """Record temporary memory on host and card. Each thread converts the dtype of its tensor on the host."""
    is_base = [isinstance(t, nn.Parameter) and (assembly.adapter is None or not t.requires_grad) for t in held]
    base = [tensor for tensor, counts in zip(held, is_base, strict=True) if counts]
    sizes = [tensor.numel() * tensor.element_size() for tensor in base]
    peft = assembly.config.peft
    is_quantized = assembly.config.training.use_peft and peft.q_lora
    if is_quantized and not is_quantized_when_loaded(assembly.config):
        width = assembly.export_dtype.itemsize
        _pass(tracker, sum(weight_count(tensor) * width for tensor in base), Space.HOST)
        return
    if assembly.config.training.use_peft and assembly.config.training.fp8 is not Fp8.NONE:
        # everything arrives before it is converted matrix by matrix
        sizes = [tensor.numel() * assembly.export_dtype.itemsize for tensor in base]
    if is_quantized or any(_is_converted(assembly, tensor) for tensor in base if tensor.dtype is not HELD):
        _pass(tracker, sum(heapq.nlargest(1 if is_quantized else LOADERS, sizes)), Space.HOST)
    if assembly.streamed is None:
        capacity = assembly.config.gpu.capacity_bytes
        limit = capacity - SPARED_BY_WARMUP if capacity is not None else sum(sizes)
        _pass(tracker, max(0, min(sum(sizes), limit)), Space.DEVICE)
    _resize(tracker, assembly)


def _resize(tracker: Tracker, assembly: Assembly) -> None:
    """Record the resizing of embedding and head, one after the other, each with old and new tensor alive."""
    if not changes_rows(assembly.config.model):
        return
    (stored, rows), matrix = embedding_rows(assembly.config), token_matrices(causal_model(assembly.model))[0]
    if stored != rows:
        _pass(tracker, matrix.numel() // rows * stored * matrix.element_size(), Space.DEVICE)


def _pass(tracker: Tracker, size: int, space: Space) -> None:
    """Record memory that is allocated and freed at once."""
    tracker.trace.bury(tracker.trace.bear(size, Kind.TEMPORARIES, space))

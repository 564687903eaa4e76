"""How the weights arrive, recorded: what transformers asks of card and host while it reads a checkpoint.

Follows `caching_allocator_warmup` (transformers/modeling_utils.py) and `convert_and_load_state_dict_in_model`
(transformers/core_model_loading.py) of transformers 5.24. The files are mapped: their pages are the system's to take
back, and are not counted.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from framework.build.adapters.quantize import packed_state, weight_count
from framework.build.assembly import Assembly
from framework.build.levers.float8 import HELD
from framework.build.levers.streamed_base import StreamedBase
from framework.build.loading.model import embedding_rows, is_packed_when_loaded
from framework.build.loading.sharded import needs_whole_model
from framework.build.loading.vocabulary import changes_rows, token_matrices
from framework.build.model.parts import causal_model, ends_of, transformer_blocks
from framework.build.ranks import local_part
from framework.memory.trace import Kind, Space
from framework.run.rehearsal.footprint import frozen_model_tensors, held_tensors, whole_bytes
from framework.run.rehearsal.tracker import Tracker
from framework.schema.choices import Fp8

LOADERS = 4
"""Threads that read tensors and bring them to the device (GLOBAL_WORKERS); one while they are packed on arrival."""
SPARED_BY_WARMUP = int(1.2 * 2**30)
"""Bytes of the card that the first large request leaves."""


def record_load(tracker: Tracker, assembly: Assembly) -> None:
    """The weights arrive, and the cache is emptied, as the trainer does before its first step."""
    tracker.observe("load")
    copied = frozen_model_tensors(assembly)
    weights = held_tensors(assembly)[: -len(copied) or None]
    if assembly.streamed is not None:
        _stay_on_host(tracker, assembly.streamed)
    if assembly.is_in_parts:
        # Each unit is whole for a moment, before it is split (framework/build/loading/sharded.py). Layers are packed
        # one by one as they are read, and after the whole unit where random weights are drawn.
        if needs_whole_model(assembly.config):
            _pass(tracker, whole_bytes(assembly), Space.HOST)
        elif assembly.config.model.load_pretrained_weights:
            converted = (size for item, size in _sizes(assembly).items() if _is_converted(assembly, item))
            _pass(tracker, max(converted, default=0), Space.HOST)
        _pass(tracker, largest_unit_bytes(assembly), Space.DEVICE)
    elif assembly.config.model.load_pretrained_weights and assembly.place.kind == "cuda":
        _read_checkpoint(tracker, assembly, weights)
    if assembly.config.fsdp.is_on_host:
        _leave_parts_on_host(tracker, weights)
    else:
        tracker.claim(weights, Kind.WEIGHTS)
    if assembly.config.training.teacher is not None and assembly.place.kind == "cuda":
        _pass(tracker, sum(tensor.numel() * tensor.element_size() for tensor in copied), Space.DEVICE)
    tracker.claim(copied, Kind.WEIGHTS)
    tracker.observe("end", empties_cache=True)
    tracker.observe("end")  # a mark of its own: what is repeated later starts here and empties nothing


def _sizes(assembly: Assembly) -> dict[nn.Parameter, int]:
    """Bytes of all of each parameter."""
    named = assembly.model.named_parameters()
    return {item: assembly.numel(name, item) * item.element_size() for name, item in named}


def largest_unit_bytes(assembly: Assembly) -> int:
    """The unit that takes most while it is whole."""
    sharding = assembly.sharding
    blocks: Sequence[nn.Module] = transformer_blocks(assembly.model)
    if sharding is not None:
        blocks = [cast(nn.Module, block) for block in sharding.blocks]
    units = [*([block] for block in blocks), *ends_of(assembly.model, blocks)]
    sizes, is_read = _sizes(assembly), assembly.config.model.load_pretrained_weights
    filled = [[item for module in unit for item in module.parameters()] for unit in units]
    in_units = {item for unit in filled for item in unit}
    filled.append([item for item in sizes if item not in in_units])
    return max(_whole_bytes(unit, sizes, is_read) for unit in filled)


def _is_converted(assembly: Assembly, weight: Tensor) -> bool:
    """Whether a tensor of a file is brought to another dtype, which is done on the host."""
    return weight.is_floating_point() and weight.dtype != assembly.export_dtype


def _whole_bytes(unit: Sequence[nn.Parameter], sizes: Mapping[nn.Parameter, int], is_read: bool) -> int:
    plain = [state.shape.numel() * state.dtype.itemsize for item in unit if (state := packed_state(item)) is not None]
    return sum(sizes[item] for item in unit) + (max(plain, default=0) if is_read else sum(plain))


def _leave_parts_on_host(tracker: Tracker, weights: Sequence[Tensor]) -> None:
    for tensor in map(local_part, weights):
        if isinstance(tensor, nn.Parameter) or tensor.is_floating_point():
            tracker.claim_elsewhere(tensor, Kind.WEIGHTS, Space.PINNED)


def _stay_on_host(tracker: Tracker, streamed: StreamedBase) -> None:
    """Each block's weights move into one run of bytes: next to them, one block at a time is there twice."""
    if streamed.place.kind == "cpu":
        tracker.claim(streamed.homes, Kind.WEIGHTS)
        return
    for home in streamed.homes:
        tracker.claim_elsewhere(home, Kind.WEIGHTS, Space.HOST)
    _pass(tracker, max(len(home) for home in streamed.homes), Space.HOST)


def _read_checkpoint(tracker: Tracker, assembly: Assembly, held: Sequence[Tensor]) -> None:
    """What is on host and card for a moment. A dtype is converted on the host, by each thread for its own tensor."""
    is_base = [isinstance(t, nn.Parameter) and (assembly.adapter is None or not t.requires_grad) for t in held]
    base = [tensor for tensor, counts in zip(held, is_base, strict=True) if counts]
    sizes = [tensor.numel() * tensor.element_size() for tensor in base]
    peft = assembly.config.peft
    is_packed = assembly.config.training.use_peft and peft.q_lora
    if is_packed and not is_packed_when_loaded(assembly.config):
        width = assembly.export_dtype.itemsize
        _pass(tracker, sum(weight_count(tensor) * width for tensor in base), Space.HOST)
        return
    if assembly.config.training.use_peft and assembly.config.training.fp8 is not Fp8.NONE:
        # all of it arrives before it is converted matrix by matrix
        sizes = [tensor.numel() * assembly.export_dtype.itemsize for tensor in base]
    if is_packed or any(_is_converted(assembly, tensor) for tensor in base if tensor.dtype is not HELD):
        _pass(tracker, sum(heapq.nlargest(1 if is_packed else LOADERS, sizes)), Space.HOST)
    if assembly.streamed is None:
        capacity = assembly.config.gpu.capacity_bytes
        limit = capacity - SPARED_BY_WARMUP if capacity is not None else sum(sizes)
        _pass(tracker, max(0, min(sum(sizes), limit)), Space.DEVICE)
    _resize(tracker, assembly)


def _resize(tracker: Tracker, assembly: Assembly) -> None:
    """An embedding of another length is made next to the one that was read, and so is a head, one after the other."""
    if not changes_rows(assembly.config.model):
        return
    (stored, rows), matrix = embedding_rows(assembly.config), token_matrices(causal_model(assembly.model))[0]
    if stored != rows:
        _pass(tracker, matrix.numel() // rows * stored * matrix.element_size(), Space.DEVICE)


def _pass(tracker: Tracker, size: int, space: Space) -> None:
    """Memory that is taken and given back at once."""
    tracker.trace.bury(tracker.trace.bear(size, Kind.TEMPORARIES, space))

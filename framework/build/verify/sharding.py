"""Readers of sharded weights, split rows and split matrices of several cards."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.build.assembly import Assembly
from framework.build.levers.streamed_base import KEY, blocks_of
from framework.build.losses.loss import Batch, ignore_phases, token_logits
from framework.build.model.parts import causal_model
from framework.build.parallel.fsdp import parameter_groups
from framework.build.place import autocast_dtype
from framework.build.ranks import local_part
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import BackwardPrefetch, ShardingStrategy
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.build.parallel.tensor_parallel import TensorParallel


def read_sharding(assembly: Assembly) -> Iterator[Reading]:
    """This rank's share of the weights, the dtypes that they are stored and gathered in, and the number of units."""
    sharding, fsdp = assembly.sharding, assembly.config.fsdp
    if sharding is None:
        if fsdp.enable_fsdp is True:
            held = "no part but all" if _held(assembly) == 1 else "a part"
            yield Reading("fsdp.sharding_strategy", "no part but all", held, "parameters of this rank")
        return
    share = round(1 / _held(assembly), 1)
    numbers: Counter[str] = Counter()
    for parameter in assembly.model.parameters():
        numbers[_name_of(parameter.dtype)] += local_part(parameter).numel()
    by_dtype = ", ".join(f"{count:,} {dtype}" for dtype, count in numbers.most_common())
    source = f"{by_dtype} of this rank; {sharding.replicas} of the same"
    yield Reading("fsdp.enable_fsdp", f"1/{sharding.shards} of the weights", f"1/{share:g} of the weights", source)
    blocks = sum(1 for block in sharding.blocks if parameter_groups(block))
    asked, found = (f"{count} {sharding.block_class} and the rest" for count in (len(sharding.blocks), blocks))
    lower = parameter_groups(sharding.blocks[0])[0].mp_policy.param_dtype
    gathered = f"fully_shard, gathered in {_name_of(lower)}" if lower is not None else "fully_shard"
    yield Reading("fsdp.transformer_layer_cls", asked, found, gathered)
    stays = {not bool(parameter_groups(block)[0].post_forward_mesh_info) for block in sharding.blocks}
    wanted = fsdp.sharding_strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
    found = str(fsdp.sharding_strategy) if stays == {wanted} else "other"
    yield Reading("fsdp.sharding_strategy", str(fsdp.sharding_strategy), found, "what frees a block after forward")


def read_offloaded_shards(assembly: Assembly) -> Iterator[Reading]:
    """Device of this rank's part of the weights."""
    if not assembly.config.fsdp.is_on_host or assembly.place.rehearsed:
        return
    kinds = Counter(local_part(parameter).device.type for parameter in assembly.model.parameters())
    yield Reading("fsdp.cpu_offload", "cpu", ", ".join(sorted(kinds)), "devices of this rank's parameters")


def read_prefetch(assembly: Assembly) -> Iterator[Reading]:
    """Number of blocks that prefetch another one."""
    sharding, fsdp = assembly.sharding, assembly.config.fsdp
    if sharding is None:
        return
    states: list[Any] = [block._get_fsdp_state() for block in sharding.blocks]
    forward = sum(1 for state in states if state._states_to_forward_prefetch)
    asked = len(states) - 1 if fsdp.forward_prefetch else 0
    yield Reading("fsdp.forward_prefetch", counted(asked, "block"), counted(forward, "block"), "lists of fully_shard")
    own = sum(1 for state in states if state._states_to_backward_prefetch == [state])
    wanted = 0 if fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE else len(states)
    found = str(fsdp.backward_prefetch) if own == wanted else f"{counted(len(states) - own, 'block')} ahead"
    yield Reading("fsdp.backward_prefetch", str(fsdp.backward_prefetch), found, "lists of fully_shard")


def _held(assembly: Assembly) -> float:
    """Share of all weights that this rank holds."""
    parameters = list(assembly.model.parameters())
    return sum(local_part(item).numel() for item in parameters) / sum(item.numel() for item in parameters)


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def read_offloaded_base(assembly: Assembly) -> Iterator[Reading]:
    """Blocks whose frozen weights are all on the host, by the addresses of their bytes."""
    asked, streamed, blocks = (
        assembly.config.model.offload_frozen_base is True,
        assembly.streamed,
        blocks_of(assembly.model),
    )
    if not asked and streamed is None:
        return
    homes = {home.untyped_storage().data_ptr() for home in streamed.homes} if streamed is not None else set()
    frozen = [[p for p in block.parameters() if not p.requires_grad] for block in blocks]
    at_home = sum(all(p.untyped_storage().data_ptr() in homes for p in weights) for weights in frozen)
    wanted, pinned = f"{len(blocks) if asked else 0}/{counted(len(blocks), 'block')}", ""
    if streamed is not None and assembly.place.kind == "cuda":
        count = sum(home.is_pinned() and home.device.type == "cpu" for home in streamed.homes)
        wanted, pinned = f"{wanted}, {len(blocks)} pinned", f", {count} pinned"
    size = sum(len(home) for home in streamed.homes) if streamed is not None else 0
    slots = ", ".join(f"{len(slot) / 2**20:,.1f}" for slot in streamed.slots) if streamed is not None else ""
    source = f"addresses: {size / 2**20:,.1f} MiB on the host, slots of {slots} MiB on {assembly.place.device}"
    yield Reading(KEY, wanted, f"{at_home}/{counted(len(blocks), 'block')}{pinned}", source)


def read_offloaded_base_again(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The same after a step: weights copied to the device have been returned."""
    yield from read_offloaded_base(assembly)


CHUNK = 4
"""Tokens per chunk of the probe; a row has two chunks per device."""


def read_context(assembly: Assembly) -> Iterator[Reading]:
    """Logits of a few tokens from the built model, as full rows and split as in training."""
    context = assembly.context
    if context is None:
        return
    asked = f"{assembly.config.context_size} devices share each row"
    before = context.calls
    # Mean over all tokens of all ranks of the relative difference of a token's logits.
    batch = few_tokens(assembly, min(2 * CHUNK * context.size, assembly.config.longest))
    part = assembly.part_of(batch)
    with predicting(assembly) as predict:
        with assembly.attention:
            parts = predict(part)
        whole = predict(batch)[:, part["positions"][0]]
    relative = (parts - whole).norm(dim=-1) / whole.norm(dim=-1)
    difference = float(assembly.ranks.sum(relative.mean()) / assembly.ranks.world)
    layers = context.calls - before
    found = f"{context.size} devices share each row"
    if not layers:
        found = "no attention goes over several devices"
    elif not is_alike(assembly, difference):
        found = f"more than attention mixes tokens: a prediction differs by {difference:.0%}"
    source = f"ring_attention of {counted(layers, 'layer')}; logits differ by {difference:.0e} from those of whole rows"
    yield Reading("fsdp.context_parallel_size", asked, found, source)


MATRICES_KEY = "fsdp.tensor_parallel_size"
MATRICES_TOKENS = 8


def read_shared_matrices(assembly: Assembly) -> Iterator[Reading]:
    """This rank's part of each planned matrix, and the predictions for a few tokens on all ranks of its group."""
    tensor = assembly.tensor
    if tensor is None:
        return
    named = dict(assembly.model.named_parameters())
    held = sum(
        named[name].shape[dimension] * tensor.size == tensor.lengths[name]
        for name, dimension in tensor.dimensions.items()
    )
    asked, found = (f"1/{tensor.size} of {counted(count, 'tensor')}" for count in (len(tensor.dimensions), held))
    yield Reading(
        MATRICES_KEY, asked, found, f"parameters of this rank: {_shapes(tensor, assembly.model)}; all else is whole"
    )
    asked = f"the same on {tensor.size} devices"
    # Relative difference of the logits within this rank's group.
    with predicting(assembly) as predict, assembly.attention:
        logits = predict(few_tokens(assembly, MATRICES_TOKENS))
    most, least = logits.clone(), logits.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, tensor.group)
    dist.all_reduce(least, dist.ReduceOp.MIN, tensor.group)
    difference = float((most - least).norm() / most.norm())
    found = asked if is_alike(assembly, difference) else f"predictions differ by {difference:.0%}"
    yield Reading(
        MATRICES_KEY, asked, found, f"logits of {MATRICES_TOKENS} tokens, which differ by {difference:.0e} in a group"
    )


def _shapes(tensor: "TensorParallel", model: nn.Module) -> str:
    """Shapes of the parts of a block's matrices, each kind once."""
    shapes: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in tensor.dimensions and parameter.dim() == 2:
            kind = ".".join(part for part in name.split(".")[-4:-1] if part not in ("base_layer", "default"))
            shapes.setdefault(".".join(kind.split(".")[-2:]), "x".join(map(str, parameter.shape)))
    return ", ".join(f"{kind} {shape}" for kind, shape in shapes.items())


_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
"""Maximum mean relative difference of a token's logits, by compute dtype. Half precision differs by a few hundredths at
most."""


def few_tokens(assembly: Assembly, count: int) -> Batch:
    """A row of `count` different tokens, on the device."""
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    ids = (torch.arange(count, device=assembly.place.device) * 5 + 3).remainder(vocabulary).unsqueeze(0)
    return {"input_ids": ids, "labels": ids}


@contextmanager
def predicting(assembly: Assembly) -> Iterator[Callable[[Batch], Tensor]]:
    """Context with a function for the logits of a batch `[rows, tokens, vocabulary]`, float32, without dropout."""
    was_training = assembly.model.training
    assembly.model.eval()
    # No backward follows. Otherwise DDP would reduce during the next backward, in the middle of the first step.
    with torch.no_grad(), assembly.autocast, assembly.keeping_gradients(is_last=False):
        yield lambda batch: assembly.through(_logits, batch)
    assembly.model.train(was_training)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()


def is_alike(assembly: Assembly, difference: float) -> bool:
    """Whether a relative difference is due to rounding; NaN is not."""
    computed = autocast_dtype(assembly.config.training) or next(assembly.model.parameters()).dtype
    return difference < _TOLERANCE.get(computed, _HALF_TOLERANCE)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return token_logits(model, batch, ignore_phases).float()

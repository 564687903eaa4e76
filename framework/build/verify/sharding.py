"""Weights that are gathered block by block: sharded ones, and frozen ones that are on the host between two steps."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from framework.build.assembly import Assembly
from framework.build.levers.streamed_base import KEY, blocks_of
from framework.build.parallel.fsdp import parameter_groups
from framework.build.ranks import local_part
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import BackwardPrefetch, ShardingStrategy
from framework.schema.plural import counted


def read_sharding(assembly: Assembly) -> Iterator[Reading]:
    """How much of the weights this rank holds, in which dtype they are held and gathered, and in how many units."""
    sharding, fsdp = assembly.sharding, assembly.config.fsdp
    if sharding is None:
        if fsdp.enable_fsdp is True:
            held = "no part but all" if _held(assembly) == 1 else "a part"
            yield Reading("fsdp.sharding_strategy", "no part but all", held, "parameters of this rank")
        return
    share = round(1 / _held(assembly), 1)
    source = f"{_dtypes(assembly)} of this rank; {sharding.replicas} of the same"
    yield Reading("fsdp.enable_fsdp", f"1/{sharding.shards} of the weights", f"1/{share:g} of the weights", source)
    blocks = sum(1 for block in sharding.blocks if parameter_groups(block))
    asked, found = (f"{count} {sharding.block_class} and the rest" for count in (len(sharding.blocks), blocks))
    lower = parameter_groups(sharding.blocks[0])[0].mp_policy.param_dtype
    gathered = f"fully_shard, gathered in {_word(lower)}" if lower is not None else "fully_shard"
    yield Reading("fsdp.transformer_layer_cls", asked, found, gathered)
    stays = {not bool(parameter_groups(block)[0].post_forward_mesh_info) for block in sharding.blocks}
    wanted = fsdp.sharding_strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
    found = str(fsdp.sharding_strategy) if stays == {wanted} else "other"
    yield Reading("fsdp.sharding_strategy", str(fsdp.sharding_strategy), found, "what frees a block after forward")


def read_offloaded_shards(assembly: Assembly) -> Iterator[Reading]:
    """Where this rank's part of the weights is."""
    if not assembly.config.fsdp.is_on_host or assembly.place.rehearsed:
        return
    kinds = Counter(local_part(parameter).device.type for parameter in assembly.model.parameters())
    yield Reading("fsdp.cpu_offload", "cpu", ", ".join(sorted(kinds)), "devices of this rank's parameters")


def read_prefetch(assembly: Assembly) -> Iterator[Reading]:
    """How many blocks gather another one before it is needed."""
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


def _dtypes(assembly: Assembly) -> str:
    counted: Counter[str] = Counter()
    for parameter in assembly.model.parameters():
        counted[_word(parameter.dtype)] += local_part(parameter).numel()
    return ", ".join(f"{count:,} {dtype}" for dtype, count in counted.most_common())


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def read_offloaded_base(assembly: Assembly) -> Iterator[Reading]:
    """Blocks whose frozen weights, every one, are at home on the host, by the addresses of their bytes."""
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
    """The same after a step: whatever visited the device is at home again."""
    yield from read_offloaded_base(assembly)

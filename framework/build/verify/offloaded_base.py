"""Where the frozen weights of the blocks are between two steps."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.levers.streamed_base import KEY, blocks_of
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.plural import counted


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

"""The CUDA allocator's own word on its settings, and how often its cache was emptied."""

from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.levers.allocator import asked_settings, environment_settings, environment_text, live_settings
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.plural import counted


def read_allocator_settings(assembly: Assembly) -> Iterator[Reading]:
    """Each setting that the recipe asks for, or the environment makes, as the live allocator has it."""
    asked = asked_settings(assembly.config.training.allocator)
    foreign = environment_settings().keys() & {name for name, _ in assembly.config.training.allocator} - asked.keys()
    if assembly.place.kind != "cuda" or not (asked or foreign):
        return
    for name, found in live_settings().items():
        key = f"training.allocator.{name}"
        if name in asked:
            yield Reading(key, asked[name], found, "torch.cuda.memory._snapshot()")
        elif name in foreign:
            yield Reading(key, None, found, f"{environment_text()[0]} of the environment; it was planned without")


def read_emptied_cache(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The same up to the first step: once where every step empties the cache, else not yet."""
    return emptied_cache(assembly, step.began, step.number)


def emptied_cache(assembly: Assembly, began: int, step: int) -> Iterator[Reading]:
    """How often the cache was emptied in the steps `began` to `step`, of the times that it was due."""
    every = assembly.cache.steps
    if every is None:
        if assembly.cache.emptied:
            yield Reading("training.empty_device_cache_steps", "never", _times(assembly.cache.emptied), "calls")
        return
    due = step // every - (began - 1) // every
    source = "calls of torch.cuda.empty_cache()"
    if assembly.place.kind == "cuda":
        source += f", {torch.cuda.memory_reserved(assembly.place.device) / 2**20:,.0f} MiB reserved since"
    else:
        source = "calls counted; the cpu has no cache to empty"
    yield Reading("training.empty_device_cache_steps", _times(due), _times(assembly.cache.emptied), source)


def _times(count: int) -> str:
    return f"emptied {counted(count, 'time')}"

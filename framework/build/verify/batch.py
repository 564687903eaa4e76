"""Readers of the first step's rows, packed rows and their documents, and the allocator of the device."""

import math
from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.levers.allocator import asked_settings, environment_settings, environment_text, live_settings
from framework.build.levers.compiled import plain_code
from framework.build.loading.document_isolation import find_leak, joining_key
from framework.build.model.parts import causal_model
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.plural import counted


def read_micro_batches(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Rows per micro-batch and the number of micro-batches. The last step of an epoch may have fewer of both."""
    batch, rows = assembly.config.batch, [rows for rows, _ in step.micro_batches]
    is_short = sum(rows) < batch.per_device * batch.accumulation
    for key, asked, found in (
        ("training.per_device_train_batch_size", batch.per_device, max(rows)),
        ("training.gradient_accumulation_steps", batch.accumulation, len(rows)),
    ):
        shown = asked if is_short and found < asked else found
        yield Reading(key, str(asked), str(shown), f"micro-batches of the first step: {_shapes(step.micro_batches)}")


def read_eval_batches(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Rows per batch of the evaluation before the first step, if any."""
    if step.eval_batches:
        asked, found = assembly.config.eval_rows, max(r for r, _ in step.eval_batches)
        shown = asked if found < asked and len(step.eval_batches) <= step.eval_sets else found
        source = f"batches of the first evaluation: {_shapes(step.eval_batches)}"
        yield Reading("training.per_device_eval_batch_size", str(asked), str(shown), source)


def read_longest_row(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether no row exceeds the limit."""
    limit, longest = assembly.config.longest, max(tokens for _, tokens in step.micro_batches)
    asked = f"at most {limit}"
    found = asked if longest <= limit else str(longest)
    yield Reading("model.model_max_length", asked, found, f"longest row of the first step: {longest} tokens")


def read_padded_lengths(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Widths of the micro-batches: multiples of the requested number."""
    multiple = assembly.config.data.pad_to_multiple_of
    if multiple is not None and step.micro_batches:
        found = math.gcd(*(tokens for _, tokens in step.micro_batches))
        shown = multiple if found % multiple == 0 else found
        source = f"widths of the first step's micro-batches: {_shapes(step.micro_batches)}"
        yield Reading("data.pad_to_multiple_of", str(multiple), str(shown), source)


def _shapes(batches: tuple[tuple[int, int], ...]) -> str:
    first = " ".join(f"{rows}x{tokens}" for rows, tokens in batches[:4])
    return first + (f" and {len(batches) - 4} more" if len(batches) > 4 else "")


def read_allocator_settings(assembly: Assembly) -> Iterator[Reading]:
    """Each setting of the recipe or the environment, as the live allocator reports it."""
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
    """The same up to the first step: once if every step empties the cache, else not yet."""
    return emptied_cache(assembly, step.began, step.number)


def emptied_cache(assembly: Assembly, began: int, step: int) -> Iterator[Reading]:
    """How often the cache was emptied in the steps `began` to `step`, of the required times."""
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


def read_isolation(assembly: Assembly) -> Iterator[Reading]:
    """Isolation of two short documents in the built model, in one row and separately; skipped if rows are not
    joined."""
    key = joining_key(assembly.config.data)
    if key is not None:
        with assembly.attention, assembly.autocast, plain_code(assembly.model):
            leak = find_leak(assembly.model, assembly.place.device)
        kernel = causal_model(assembly.model).config._attn_implementation
        source = f"gradient between two documents, and one of them by itself, with {kernel}"
        yield Reading(key, "documents kept separately", leak or "documents kept separately", source)


def read_rows_end_to_end(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether each micro-batch of the first step is one row of documents, if requested."""
    if assembly.config.data.padding_free and step.documents:
        alone = step.joined and all(len(micro_batch) == 1 for micro_batch in step.documents)
        rows = sum(len(row) for micro_batch in step.documents for row in micro_batch)
        source = f"positions of the first step: {counted(rows, 'row')} in {len(step.documents)} without padding"
        yield Reading("data.padding_free", "true", str(alone).lower(), source)


def read_grouped_rows(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether the rows of the first step are sorted longest first, if they are grouped by length."""
    if assembly.config.data.group_by_length and step.documents:
        one_each = assembly.config.data.padding_free
        rows = [row for micro_batch in step.documents for row in micro_batch]
        lengths = [length for row in rows for length in row] if one_each else list(map(sum, rows))
        found = str(lengths == sorted(lengths, reverse=True)).lower()
        yield Reading(
            "data.group_by_length", "true", found, f"rows of the first step: {lengths[0]} to {lengths[-1]} tokens"
        )


def read_packed_rows(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Documents per row of the first step, by restarts of the positions."""
    rows = [row for micro_batch in step.documents for row in micro_batch]
    if not rows or assembly.config.data.padding_free:
        return
    limit = assembly.config.model.model_max_length
    assert isinstance(limit, int), "a resolved config has a length"
    filled = sum(map(sum, rows)) / (len(rows) * limit)
    source = f"positions of the first step: {counted(sum(map(len, rows)), 'document')} in {counted(len(rows), 'row')}"
    asked, found = str(assembly.config.data.packing).lower(), str(step.joined).lower()
    yield Reading("data.packing", asked, found, f"{source}, {filled:.1%} of {limit} tokens each")

"""Rows that hold several documents: that they do, and that the model keeps them apart."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.levers.compiled import plain_code
from framework.build.loading.document_isolation import find_leak, joining_key
from framework.build.model.parts import causal_model
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.plural import counted


def read_isolation(assembly: Assembly) -> Iterator[Reading]:
    """Two short documents through the built model, in one row and alone. Nothing is read where rows are not joined."""
    key = joining_key(assembly.config.data)
    if key is not None:
        with assembly.attention, assembly.autocast, plain_code(assembly.model):
            leak = find_leak(assembly.model, assembly.place.device)
        kernel = causal_model(assembly.model).config._attn_implementation
        source = f"gradient between two documents, and one of them alone, with {kernel}"
        yield Reading(key, "documents kept separately", leak or "documents kept separately", source)


def read_rows_end_to_end(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Each micro batch of the first step is one row of documents, when that was asked for."""
    if assembly.config.data.padding_free and step.documents:
        alone = step.joined and all(len(micro_batch) == 1 for micro_batch in step.documents)
        rows = sum(len(row) for micro_batch in step.documents for row in micro_batch)
        source = f"positions of the first step: {counted(rows, 'row')} in {len(step.documents)} without padding"
        yield Reading("data.padding_free", "true", str(alone).lower(), source)


def read_grouped_rows(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The rows of the first step come longest first, when they were to be grouped by length."""
    if assembly.config.data.group_by_length and step.documents:
        one_each = assembly.config.data.padding_free
        rows = [row for micro_batch in step.documents for row in micro_batch]
        lengths = [length for row in rows for length in row] if one_each else list(map(sum, rows))
        found = str(lengths == sorted(lengths, reverse=True)).lower()
        yield Reading(
            "data.group_by_length", "true", found, f"rows of the first step: {lengths[0]} to {lengths[-1]} tokens"
        )


def read_packed_rows(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Documents a row of the first step, by the positions that start again in each."""
    rows = [row for micro_batch in step.documents for row in micro_batch]
    if not rows or assembly.config.data.padding_free:
        return
    limit = assembly.config.model.model_max_length
    assert isinstance(limit, int), "a resolved config has a length"
    filled = sum(map(sum, rows)) / (len(rows) * limit)
    source = f"positions of the first step: {counted(sum(map(len, rows)), 'document')} in {counted(len(rows), 'row')}"
    asked, found = str(assembly.config.data.packing).lower(), str(step.joined).lower()
    yield Reading("data.packing", asked, found, f"{source}, {filled:.1%} of {limit} tokens each")

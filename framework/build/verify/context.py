"""Rows that several devices share: that attention goes over all of them, and that nothing else mixes tokens."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.verify.predictions import few_tokens, is_alike, predicting
from framework.build.verify.reading import Reading
from framework.schema.plural import counted

CHUNK = 4
"""Tokens of a chunk of the probe; a row has two chunks a device."""


def read_context(assembly: Assembly) -> Iterator[Reading]:
    """A few tokens forward through the built model as whole rows, and as the parts that training makes of them."""
    context = assembly.context
    if context is None:
        return
    asked = f"{assembly.config.context_size} devices share each row"
    before = context.calls
    difference = _difference(assembly, context.size)
    layers = context.calls - before
    found = f"{context.size} devices share each row"
    if not layers:
        found = "no attention goes over several devices"
    elif not is_alike(assembly, difference):
        found = f"more than attention mixes tokens: a prediction differs by {difference:.0%}"
    source = f"ring_attention of {counted(layers, 'layer')}; logits differ by {difference:.0e} from those of whole rows"
    yield Reading("fsdp.context_parallel_size", asked, found, source)


def _difference(assembly: Assembly, size: int) -> float:
    """Mean over all tokens of all ranks of the relative difference of a token's logits."""
    batch = few_tokens(assembly, min(2 * CHUNK * size, assembly.config.longest))
    part = assembly.part_of(batch)
    with predicting(assembly) as predict:
        with assembly.attention:
            parts = predict(part)
        whole = predict(batch)[:, part["positions"][0]]
    apart = (parts - whole).norm(dim=-1) / whole.norm(dim=-1)
    return float(assembly.ranks.sum(apart.mean()) / assembly.ranks.world)

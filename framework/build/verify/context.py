"""Rows that several devices share: that attention goes over all of them, and that nothing else mixes tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from framework.build.assembly import Assembly, autocast_dtype
from framework.build.loss import Batch, causal_model, ignore_phases, token_logits
from framework.build.verify.reading import Reading

CHUNK = 4
"""Tokens of a chunk of the probe; a row has two chunks a device."""
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Mean relative difference of a token's logits, by the dtype that is computed in. Half precision differs by a few
hundredths at most."""


def read_context(assembly: Assembly) -> Iterator[Reading]:
    """A few tokens forward through the built model as whole rows, and as the parts that training makes of them."""
    context = assembly.context
    if context is None:
        return
    asked = f"{assembly.config.context_size} devices share each row"
    before = context.calls
    difference = _difference(assembly)
    layers = context.calls - before
    found = f"{context.size} devices share each row"
    if not layers:
        found = "no attention goes over several devices"
    elif not difference < TOLERANCE.get(_computed(assembly), HALF_TOLERANCE):
        found = f"more than attention mixes tokens: a prediction differs by {difference:.0%}"
    source = f"ring_attention of {layers} layers; logits differ by {difference:.0e} from those of whole rows"
    yield Reading("fsdp.context_parallel_size", asked, found, source)


def _difference(assembly: Assembly) -> float:
    """Mean over all tokens of all ranks of the relative difference of a token's logits."""
    context, device = assembly.context, assembly.place.device
    assert context is not None
    tokens = min(2 * CHUNK * context.size, assembly.config.longest)
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    ids = (torch.arange(tokens, device=device) * 5 + 3).remainder(vocabulary).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids}
    part = assembly.part_of(batch)
    was_training = assembly.model.training
    assembly.model.eval()
    # No backward follows. DDP must be told, or it reduces the next one, in the middle of the first step.
    with torch.no_grad(), assembly.autocast, assembly.keeping_gradients(is_last=False):
        with assembly.attention:
            parts = assembly.through(_logits, part)
        whole = assembly.through(_logits, batch)[:, part["positions"][0]]
    assembly.model.train(was_training)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()
    apart = (parts - whole).norm(dim=-1) / whole.norm(dim=-1)
    return float(assembly.ranks.sum(apart.mean()) / assembly.ranks.world)


def _computed(assembly: Assembly) -> torch.dtype:
    return autocast_dtype(assembly.config.training) or next(assembly.model.parameters()).dtype


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return token_logits(model, batch, ignore_phases).float()

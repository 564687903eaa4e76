"""Whether anything but attention mixes the tokens of a row: then ranks cannot share it.

Asked of a small random model of the same kind whose tokens attend to themselves alone: a part of a row, with its
positions, must give what it gives within the whole row. Convolutions, state spaces, linear attention and positions that
are counted from the first token given fail that.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.build.attention.context import Context
from framework.build.attention.ring_attention import NAME, attending_to_themselves, know_ring_attention
from framework.build.loading.document_isolation import cut_down
from framework.build.losses.loss import model_inputs
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig

SHARING, CHUNK = 2, 4
"""Ranks of the probe, and tokens of each of their two chunks."""
TOLERANCE = 1e-3
"""Relative difference of logits in float32; a convolution's is a tenth and more."""
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions that change with the largest position given, which differs from rank to rank."""


def refuse_mixing(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raises RequestError, before any weight is loaded, where ranks cannot share the rows of such a model.

    Kinds that cannot be cut down are left to the built model's own reading (`framework.build.verify.sharding`).
    """
    if config.context_size == 1:
        return
    kind = architecture.model_type
    said = None
    if stretched := sorted({*_rope_types(architecture.get_text_config().to_dict())} & {*_BY_LENGTH}):
        said = f"{kind} has {stretched[0]} positions, which change with the last position that a device sees"
    else:
        know_ring_attention()
        with torch.random.fork_rng(devices=[]):
            with attending_to_themselves():
                small = cut_down(architecture, NAME)
            if small is None and cut_down(architecture, None) is not None:
                said = f"{kind} does not take its attention from outside"
            elif small is not None and not _difference(small) < TOLERANCE:
                said = f"more than attention mixes the tokens of {kind}, of which each device has a part"
    if said is not None:
        raise RequestError([Problem("model.attn_implementation", said, expected="sdpa")])


def _difference(model: PreTrainedModel) -> float:
    """The largest relative difference of a token's logits in a part of a row from those in the row."""
    ids = (torch.arange(2 * CHUNK * SHARING) * 5 + 3).remainder(model.config.get_text_config().vocab_size).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad(), attending_to_themselves():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = [Context(rank, SHARING).cut(batch) for rank in range(SHARING)]
        found = [(part, model(**model_inputs(model, part), use_cache=False).logits) for part in parts]
    rows = [(logits, whole[:, part["positions"][0]]) for part, logits in found]
    return max(float(((logits - row).norm(dim=-1) / row.norm(dim=-1)).max()) for logits, row in rows)


def _rope_types(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rope_scaling", "rope_parameters"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            kinds = [rope, *(item for item in rope.values() if isinstance(item, Mapping))]
            yield from (str(kind.get("rope_type", kind.get("type"))) for kind in kinds)

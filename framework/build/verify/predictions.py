"""Predictions of a few tokens by the built model, to hold those of several ranks against each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from framework.build.assembly import Assembly
from framework.build.dtypes import autocast_dtype
from framework.build.losses.loss import Batch, ignore_phases, token_logits
from framework.build.model.parts import causal_model

_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
"""Mean relative difference of a token's logits, by the dtype that is computed in. Half precision differs by a few
hundredths at most."""


def few_tokens(assembly: Assembly, count: int) -> Batch:
    """A row of `count` different tokens, on the device."""
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    ids = (torch.arange(count, device=assembly.place.device) * 5 + 3).remainder(vocabulary).unsqueeze(0)
    return {"input_ids": ids, "labels": ids}


@contextmanager
def predicting(assembly: Assembly) -> Iterator[Callable[[Batch], Tensor]]:
    """Within the block, what gives the logits of a batch `[rows, tokens, vocabulary]`, float32, without dropout."""
    was_training = assembly.model.training
    assembly.model.eval()
    # No backward follows. DDP must be told, or it reduces the next one, in the middle of the first step.
    with torch.no_grad(), assembly.autocast, assembly.keeping_gradients(is_last=False):
        yield lambda batch: assembly.through(_logits, batch)
    assembly.model.train(was_training)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()


def is_alike(assembly: Assembly, difference: float) -> bool:
    """Whether a relative difference is one of rounding; one that is no number is not."""
    computed = autocast_dtype(assembly.config.training) or next(assembly.model.parameters()).dtype
    return difference < _TOLERANCE.get(computed, _HALF_TOLERANCE)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return token_logits(model, batch, ignore_phases).float()

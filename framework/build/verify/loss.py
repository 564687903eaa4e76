"""Whether the loss is computed as it was asked for."""

from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.loss import head_is_last
from framework.build.verify.reading import Reading


def read_chunked_loss(assembly: Assembly) -> Iterator[Reading]:
    """A few tokens through the model tell whether its head can be computed apart from it."""
    if assembly.config.model.chunked_loss is False:
        return
    model = assembly.model
    ids = torch.arange(4, device=assembly.place.device).unsqueeze(0)
    model.eval()
    with assembly.autocast:
        apart = head_is_last(model, {"input_ids": ids})
    model.train()
    asked = str(assembly.config.model.chunked_loss)
    found = asked if apart else "no: this model changes its logits after the head"
    yield Reading("model.chunked_loss", asked, found, "logits with the head's output replaced")

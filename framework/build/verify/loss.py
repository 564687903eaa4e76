"""Whether the loss is computed as it was asked for."""

from collections.abc import Iterator

import torch
from torch import nn

from framework.build.assembly import Assembly
from framework.build.loss import head_is_last
from framework.build.verify.reading import Reading

CHANGED, SOURCE = "no: this model changes its logits after the head", "logits with the head's output replaced"


def read_chunked_loss(assembly: Assembly) -> Iterator[Reading]:
    """A few tokens through the model tell whether its head can be computed apart from it."""
    if assembly.config.model.chunked_loss is False or assembly.config.training.task.is_of_rows:
        return
    asked = str(assembly.config.model.chunked_loss)
    yield Reading("model.chunked_loss", asked, asked if _is_apart(assembly, assembly.model) else CHANGED, SOURCE)
    if assembly.config.training.teacher is not None and assembly.companion is not None:
        found = asked if _is_apart(assembly, assembly.companion) else CHANGED
        yield Reading("model.chunked_loss of the teacher", asked, found, SOURCE)


def _is_apart(assembly: Assembly, model: nn.Module) -> bool:
    """Whether the head of a model can be computed apart from it."""
    was_training = model.training
    model.eval()
    with assembly.autocast:
        batch = {"input_ids": torch.arange(4, device=assembly.place.device).unsqueeze(0)}
        with torch.no_grad():
            apart = assembly.through(head_is_last, batch) if model is assembly.model else head_is_last(model, batch)
    model.train(was_training)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()  # no backward follows
    return bool(apart)

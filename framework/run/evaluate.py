"""Evaluation: the mean token loss over held-out rows. No logits outlive their batch."""

import math
from collections.abc import Iterable

import torch

from framework.build.assembly import Assembly
from framework.build.loss import Batch, Observe
from framework.build.optimizers.schedule_free import averaged
from framework.run.step import eval_step


def evaluate(assembly: Assembly, batches: Iterable[Batch], observe: Observe) -> dict[str, float]:
    """`eval_loss` (mean over the supervised tokens of all batches) and `perplexity`. Leaves the model in train mode."""
    assembly.model.eval()
    total = torch.zeros((), dtype=torch.float64)
    counted = 0
    try:
        with averaged(assembly.optimizer):
            for batch in batches:
                loss, tokens = eval_step(assembly, batch, observe)
                total += loss.double().cpu()
                counted += int(tokens)
    finally:
        assembly.model.train()
        observe("end")
    mean = float(total) / counted
    return {"eval_loss": mean, "perplexity": math.exp(min(mean, 700.0))}

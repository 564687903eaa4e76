"""Objectives of `sft` and `pretrain` (cross entropy of next tokens) and of `distillation`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.build.losses.chunked_loss import Compared, Head, chunked_comparison, chunked_distillation, compare
from framework.build.losses.loss import (
    Batch,
    Loss,
    Observe,
    head_inputs,
    ignore_phases,
    next_tokens,
    supervised_tokens,
    token_logits,
)
from framework.build.losses.router_loss import RouterLoss
from framework.schema.objectives import DistillationParams


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the supervised tokens, over all logits at once or in chunks, as `loss` computes it.

    `routers` is the auxiliary loss of a mixture of experts. transformers adds it to the mean cross entropy of a batch;
    here it is weighted by the supervised tokens of a micro-batch, so that a global batch has the weighted mean over its
    micro-batches. Unlike the cross entropy, it depends on how a batch is split, since the load is balanced within each
    micro-batch.
    """

    loss: Loss
    routers: RouterLoss | None = None
    unit: str = "supervised tokens"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        if self.routers is None:
            return self.loss(model, batch, observe)
        with self.routers.watched(model) as seen:
            loss = self.loss(model, batch, observe)
        return loss + supervised_tokens(batch) * self.routers(seen, batch)

    def terms(self, batch: Batch) -> Tensor:
        return supervised_tokens(batch)

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        terms = supervised_tokens(batch)
        if self.routers is None:
            loss, correct = self.loss.counts(model, batch)
            return {"loss": loss, "terms": terms, "correct": correct}
        with self.routers.watched(model) as seen:
            loss, correct = self.loss.counts(model, batch)
        return {"loss": loss, "terms": terms, "correct": correct, "router_loss": terms * self.routers(seen, batch)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`eval_loss` is the training loss, router loss included; `perplexity` is from the cross entropy alone."""
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        routers = {"router_loss": means["router_loss"]} if "router_loss" in means else {}
        return {
            "eval_loss": means["loss"] + routers.get("router_loss", 0.0),
            "perplexity": math.exp(min(means["loss"], 700.0)),
            "token_accuracy": means["correct"],
            **routers,
        }


@dataclass(frozen=True)
class Distillation:
    """Divergence from the teacher and cross entropy of the labels, weighted by `rule`.

    The teacher runs first and keeps only its logits; with `chunk` only its last hidden states, and the logits of
    `chunk` tokens at a time are compared.
    """

    teacher: nn.Module
    rule: DistillationParams
    chunk: int | None
    unit: str = "supervised tokens"

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        if self.chunk is None:
            return self._compared(model, batch, observe).loss
        heads, targets = self._heads(model, batch, observe)
        return chunked_distillation(*heads, targets, self.rule, self.chunk)

    def terms(self, batch: Batch) -> Tensor:
        return supervised_tokens(batch)

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        if self.chunk is None:
            compared = self._compared(model, batch, ignore_phases)
        else:
            heads, targets = self._heads(model, batch, ignore_phases)
            compared = chunked_comparison(*heads, targets, self.rule, self.chunk)
        return {**compared._asdict(), "terms": supervised_tokens(batch)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        means = {name: float(total / sums["terms"]) for name, total in sums.items()}
        return {
            "eval_loss": means["loss"],
            "divergence": means["divergence"],
            "perplexity": math.exp(min(means["label_loss"], 700.0)),
            "token_accuracy": means["correct"],
        }

    def _compared(self, model: nn.Module, batch: Batch, observe: Observe) -> Compared:
        with torch.no_grad():
            teachers = token_logits(self.teacher, batch, ignore_phases).flatten(0, 1)
        scores = token_logits(model, batch, observe).flatten(0, 1)
        return compare(scores, teachers, next_tokens(batch).flatten(), self.rule)

    def _heads(self, model: nn.Module, batch: Batch, observe: Observe) -> tuple[tuple[Head, Head], Tensor]:
        with torch.no_grad():
            hidden, weight, bias, targets = head_inputs(self.teacher, batch, ignore_phases)
        teachers = Head(hidden, weight, bias)
        hidden, weight, bias, targets = head_inputs(model, batch, observe)
        return (Head(hidden, weight, bias), teachers), targets

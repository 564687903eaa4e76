"""Linear head and what is made of its logits, a chunk of tokens at a time.

The logits of one chunk exist, never all of them, and their gradient is written over them: for 8,192 tokens and 128,256
words that is 0.25 GiB instead of the 11.7 GiB that float32 logits and their gradient take. Of a cross entropy the
gradients are computed in forward, and backward only scales them; log-probabilities by token do not know what will be
made of them, so their backward computes each chunk's logits again.
Source of the idea: Liger's fused linear cross entropy (Hsu et al. 2024); this is our own code.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from framework.build.losses.cross_entropy import PLAIN, LossTerms, token_losses


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, terms: LossTerms = PLAIN
) -> Tensor:
    """Sum of cross entropies, and of `terms`, of `hidden @ weight.T + bias` against `targets`, which ignore -100.

    hidden `[tokens, width]`, weight `[vocabulary, width]`, bias `[vocabulary]`, targets `[tokens]`; float32 scalar.
    Under autocast the products run in its dtype, as a linear layer's would.
    """
    kind, dtype = product_dtype(hidden, weight)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk, dtype, terms)  # type: ignore[no-untyped-call]
    return loss


def chunked_log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
) -> Tensor:
    """Log-probability of each target, 0 where it is -100: float32 of shape `[tokens]`. Arguments as above."""
    kind, dtype = product_dtype(hidden, weight)
    with torch.autocast(kind, enabled=False):
        found: Tensor = _ChunkedLogProbabilities.apply(hidden, weight, bias, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def chunked_counts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same sum of cross entropies, and how many targets are the likeliest token: float32 and int64 scalars."""
    kind, dtype = product_dtype(hidden, weight)
    losses = new_losses(hidden, targets)
    hits = torch.empty_like(targets, dtype=torch.bool)
    with torch.autocast(kind, enabled=False):
        computed = weight.to(dtype)
        for part in chunks(hidden, chunk):
            logits = chunk_logits(hidden[part].to(dtype), computed, bias)
            token_losses(logits, targets[part], losses[part], hits=hits[part])
            del logits
    return losses.sum(), hits.sum()


def product_dtype(hidden: Tensor, weight: Tensor) -> tuple[str, torch.dtype]:
    """Kind of device, and the dtype that a linear layer would multiply in."""
    kind = "cpu" if hidden.device.type == "cpu" else "cuda"
    return kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def chunks(hidden: Tensor, chunk: int) -> Iterator[slice]:
    """Which tokens are computed together, one chunk after the other."""
    return (slice(start, start + chunk) for start in range(0, hidden.shape[0], chunk))


def chunk_logits(rows: Tensor, computed: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of one chunk, in the dtype of the product."""
    logits = rows @ computed.t()
    if bias is not None:
        logits += bias
    return logits


def new_losses(hidden: Tensor, targets: Tensor) -> Tensor:
    """Room for a loss of each token: float32, of float64 hidden states float64."""
    return torch.empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


def adds_wider(total: Tensor, grad: Tensor) -> bool:
    """Whether a product of `grad` can be added to a float32 total inside cuBLAS, without a half-precision product."""
    return total.dtype == torch.float32 and grad.device.type == "cuda" and torch.version.hip is None


class HeadGradients:
    """Gradients of what a linear head reads and of its weights, added up a chunk at a time; None where not needed."""

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        of_hidden, of_weight, of_bias = needed
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.weight = torch.zeros_like(weight) if of_weight else None
        self.bias = torch.zeros_like(bias) if bias is not None and of_bias else None

    def add(self, part: slice, grad: Tensor, rows: Tensor, computed: Tensor) -> None:
        """One chunk: the gradient of its logits, what the head read in the dtype of the product, and the weight."""
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.hidden is not None and self.hidden.dtype == grad.dtype:
            torch.mm(grad, computed, out=self.hidden[part])
        elif self.hidden is not None:
            self.hidden[part] = grad @ computed
        if self.weight is None:
            return
        if self.weight.dtype == grad.dtype:  # without a product as large as the weight
            self.weight.addmm_(grad.t(), rows)
        elif adds_wider(self.weight, grad):
            torch.addmm(self.weight, grad.t(), rows, out_dtype=self.weight.dtype, out=self.weight)
        else:
            self.weight += grad.t() @ rows

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the order of the head's arguments."""
        return self.hidden, self.weight, self.bias


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
        terms: LossTerms,
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        computed, losses = weight.to(dtype), new_losses(hidden, targets)
        gradients = HeadGradients(needed, hidden, weight, bias)
        for part in chunks(hidden, chunk):
            rows = hidden[part].to(dtype)
            logits = chunk_logits(rows, computed, bias)
            token_losses(logits, targets[part], losses[part], with_grad=any(needed), terms=terms)
            gradients.add(part, logits, rows, computed)
            del logits
        ctx.save_for_backward(*gradients.all())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad.mul_(scale) if grad is not None else None for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None)


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        computed, losses = weight.to(dtype), new_losses(hidden, targets)
        for part in chunks(hidden, chunk):
            logits = chunk_logits(hidden[part].to(dtype), computed, bias)
            token_losses(logits, targets[part], losses[part])
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk, ctx.dtype = chunk, dtype
        return losses.neg_()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        computed, scale = weight.to(ctx.dtype), scale.neg()
        losses = new_losses(hidden, targets)
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias)
        for part in chunks(hidden, ctx.chunk):
            rows = hidden[part].to(ctx.dtype)
            logits = chunk_logits(rows, computed, bias)
            token_losses(logits, targets[part], losses[part], scales=scale[part], with_grad=True)
            gradients.add(part, logits, rows, computed)
            del logits
        return (*gradients.all(), None, None, None)

"""Linear head and what is made of its logits, a chunk of tokens at a time.

The logits of one chunk exist, never all of them: for 8,192 tokens and 128,256 words that is 0.5 GiB instead of the
11.7 GiB that float32 logits and their gradient take (SPEED.md section 4). Of a cross entropy the gradients are computed
in forward, and backward only scales them; log-probabilities by token do not know what will be made of them, so their
backward computes each chunk's logits again.
Source of the idea: Liger's fused linear cross entropy (Hsu et al. 2024); this is our own code.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> Tensor:
    """Sum of cross entropies of `hidden @ weight.T + bias` against `targets`, which ignore -100.

    hidden `[tokens, width]`, weight `[vocabulary, width]`, bias `[vocabulary]`, targets `[tokens]`; float32 scalar.
    Under autocast the products run in its dtype, as a linear layer's would.
    """
    kind, dtype = product_dtype(hidden, weight)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk, dtype)  # type: ignore[no-untyped-call]
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
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    with torch.autocast(kind, enabled=False):
        computed = weight.to(dtype)
        for part in chunks(hidden, chunk):
            scores = chunk_scores(hidden[part].to(dtype), computed, bias)
            loss += _chunk(scores, targets[part], with_grad=False)
            correct += (scores.argmax(1) == targets[part]).sum()
            del scores
    return loss, correct


def product_dtype(hidden: Tensor, weight: Tensor) -> tuple[str, torch.dtype]:
    """Kind of device, and the dtype that a linear layer would multiply in."""
    kind = "cpu" if hidden.device.type == "cpu" else "cuda"
    return kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def chunks(hidden: Tensor, chunk: int) -> Iterator[slice]:
    """Which tokens are computed together, one chunk after the other."""
    return (slice(start, start + chunk) for start in range(0, hidden.shape[0], chunk))


def chunk_scores(rows: Tensor, computed: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 logits of one chunk."""
    scores = rows @ computed.t()
    if bias is not None:
        scores += bias
    return scores.float()


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
    ) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        computed = weight.to(dtype)
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight) if of_weight else None
        bias_grad = torch.zeros_like(bias) if bias is not None and of_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in chunks(hidden, chunk):
            rows = hidden[part].to(dtype)
            scores = chunk_scores(rows, computed, bias)
            total += _chunk(scores, targets[part], of_hidden or of_weight)
            if bias_grad is not None:
                bias_grad += scores.sum(0)
            if not (of_hidden or of_weight):
                continue
            grad = scores.to(dtype)
            del scores
            if hidden_grad is not None:
                hidden_grad[part] = grad @ computed
            add_product(weight_grad, grad, rows)
            del grad
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad.mul_(scale) if grad is not None else None for grad in ctx.saved_tensors]
        return (*grads, None, None, None)


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
        computed = weight.to(dtype)
        found = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(found)
        for part in chunks(hidden, chunk):
            scores = chunk_scores(hidden[part].to(dtype), computed, bias)
            log_sums[part] = scores.logsumexp(1)
            picked = scores.gather(1, targets[part].clamp_min(0).unsqueeze(1)).squeeze(1)
            found[part] = (picked - log_sums[part]) * (targets[part] != -100)
            del scores
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        ctx.chunk, ctx.dtype = chunk, dtype
        return found

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        dtype, computed = ctx.dtype, weight.to(ctx.dtype)
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight) if of_weight else None
        bias_grad = torch.zeros_like(bias) if bias is not None and of_bias else None
        for part in chunks(hidden, ctx.chunk):
            rows, picked = hidden[part].to(dtype), targets[part].clamp_min(0).unsqueeze(1)
            scores = chunk_scores(rows, computed, bias)
            scores.sub_(log_sums[part].unsqueeze(1)).exp_().neg_()
            scores.scatter_add_(1, picked, torch.ones_like(picked, dtype=scores.dtype))
            scores.mul_((scale[part] * (targets[part] != -100)).unsqueeze(1))
            if bias_grad is not None:
                bias_grad += scores.sum(0)
            grad = scores.to(dtype)
            del scores
            if hidden_grad is not None:
                hidden_grad[part] = grad @ computed
            add_product(weight_grad, grad, rows)
            del grad
        return hidden_grad, weight_grad, bias_grad, None, None, None


def add_product(weight_grad: Tensor | None, grad: Tensor, rows: Tensor) -> None:
    """One chunk's part of the gradient of the head's weight."""
    if weight_grad is not None and weight_grad.dtype == grad.dtype:
        weight_grad.addmm_(grad.t(), rows)  # without a product as large as the weight
    elif weight_grad is not None:
        weight_grad += grad.t() @ rows


def _chunk(scores: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
    """Loss sum of one chunk. Its float32 logits become d loss / d logits, in place."""
    supervised = targets != -100
    picked = targets.clamp_min(0).unsqueeze(1)
    log_sum = scores.logsumexp(1)
    loss: Tensor = ((log_sum - scores.gather(1, picked).squeeze(1)) * supervised).sum()
    if with_grad:
        scores.sub_(log_sum.unsqueeze(1)).exp_()
        scores.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=scores.dtype))
        scores.mul_(supervised.unsqueeze(1))
    return loss

"""Linear head and cross entropy a chunk of tokens at a time, gradients computed in forward.

The logits of one chunk exist, never all of them: for 8,192 tokens and 128,256 words that is 0.5 GiB instead of the
11.7 GiB that float32 logits and their gradient take (SPEED.md section 4). Backward only scales what forward left.
Source of the idea: Liger's fused linear cross entropy (Hsu et al. 2024); this is our own code.
"""

from typing import Any

import torch
from torch import Tensor


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> Tensor:
    """Sum of cross entropies of `hidden @ weight.T + bias` against `targets`, which ignore -100.

    hidden `[tokens, width]`, weight `[vocabulary, width]`, bias `[vocabulary]`, targets `[tokens]`; float32 scalar.
    Under autocast the products run in its dtype, as a linear layer's would.
    """
    kind = "cpu" if hidden.device.type == "cpu" else "cuda"
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


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
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            rows, wanted = hidden[part].to(dtype), targets[part]
            scores = rows @ computed.t()
            if bias is not None:
                scores += bias
            scores = scores.float()  # one name, so that no chunk outlives its use
            total += _chunk(scores, wanted, of_hidden or of_weight)
            if bias_grad is not None:
                bias_grad += scores.sum(0)
            if not (of_hidden or of_weight):
                continue
            grad = scores.to(dtype)
            del scores
            if hidden_grad is not None:
                hidden_grad[part] = grad @ computed
            if weight_grad is not None and weight_grad.dtype == dtype:
                weight_grad.addmm_(grad.t(), rows)  # without a product as large as the weight
            elif weight_grad is not None:
                weight_grad += grad.t() @ rows
            del grad
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad.mul_(scale) if grad is not None else None for grad in ctx.saved_tensors]
        return (*grads, None, None, None)


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

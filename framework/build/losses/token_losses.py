"""Cross entropy of each token from a chunk of logits, over which its gradient is written.

On CUDA cards one Triton kernel reads the logits twice and writes them once, in their own dtype, with float32 sums and
no copy. Everywhere else plain torch does the same with a float32 copy of half-precision logits. The operator
`tunesmith::token_losses_` exists so that a rehearsal sees one call, which takes no memory.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

IGNORED = -100

Launch = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool], None]


def token_losses(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    *,
    hits: Tensor | None = None,
    scales: Tensor | None = None,
    with_grad: bool = False,
) -> None:
    """Fill `losses` `[tokens]` with the cross entropy of each row of `logits` `[tokens, vocabulary]`, contiguous, and
    `hits` `[tokens]`, bool, with whether the target is the likeliest token.

    0 and False where `targets` `[tokens]` is -100. With `with_grad` the logits become d loss / d logits, times
    `scales` `[tokens]`, float32, if given.
    """
    if logits.device.type == "cuda":  # a rehearsed card's too
        torch.ops.tunesmith.token_losses_(logits, targets, losses, hits, scales, with_grad)
    else:
        _token_losses(logits, targets, losses, hits, scales, with_grad)


@functools.cache
def _kernel() -> Launch:
    """The kernel, by triton, which torch for CUDA brings on Linux; else plain torch."""
    try:
        from framework.build.losses.token_losses_kernel import token_losses_on_gpu
    except ImportError:
        return _token_losses
    return token_losses_on_gpu


_LIBRARY = torch.library.Library("tunesmith", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "token_losses_(Tensor(a!) logits, Tensor targets, Tensor(b!) losses, Tensor(c!)? hits, Tensor? scales, "
    "bool with_grad) -> ()"
)
_LIBRARY.impl("token_losses_", lambda *arguments: _kernel()(*arguments), "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("token_losses_", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


def _token_losses(
    logits: Tensor, targets: Tensor, losses: Tensor, hits: Tensor | None, scales: Tensor | None, with_grad: bool
) -> None:
    """The same in plain torch, at least in float32."""
    supervised = targets != IGNORED
    picked = targets.clamp_min(0).unsqueeze(1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sums = scores.logsumexp(1)
    losses.copy_((log_sums - scores.gather(1, picked).squeeze(1)).where(supervised, 0))
    if hits is not None:
        hits.copy_(scores.argmax(1) == targets)
    if not with_grad:
        return
    scores.sub_(log_sums.unsqueeze(1)).exp_()
    scores.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=scores.dtype))
    scores.mul_((supervised if scales is None else scales * supervised).unsqueeze(1))
    if scores is not logits:
        logits.copy_(scores)

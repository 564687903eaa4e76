"""Token losses of a chunk of logits, which are overwritten by their gradient: cross entropy and further terms.

On CUDA cards one Triton kernel reads the logits twice and writes them once, in their own dtype, with float32 sums and
no copy. Everywhere else plain torch does the same with a float32 copy of half-precision logits. The operator
`tunesmith::token_losses_` exists so that a rehearsal sees one call, which takes no memory.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from framework.build.text.labels import IGNORED

Launch = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, float, float], None]


class LossTerms(NamedTuple):
    """Terms on the logits x of a token in addition to the cross entropy.

    `smoothing` is the share of the target spread over the vocabulary, as torch's `label_smoothing` (Szegedy et al.
    2015, arXiv
    1512.00567, section 7); `z_loss` is the coefficient of (log sum exp x)^2 (Chowdhery et al. 2022, arXiv 2204.02311,
    section 5).
    """

    smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = LossTerms()


def token_losses(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    *,
    hits: Tensor | None = None,
    scales: Tensor | None = None,
    with_grad: bool = False,
    terms: LossTerms = PLAIN,
) -> None:
    """Fill `losses` `[tokens]` with the loss of each row of `logits` `[tokens, vocabulary]`, contiguous, and
    `hits` `[tokens]`, bool, with whether the target is the likeliest token.

    0 and False where `targets` `[tokens]` is -100. With `with_grad` the logits become d loss / d logits, times
    `scales` `[tokens]`, float32, if given.
    """
    if logits.device.type == "cuda":  # also on a rehearsal's device
        torch.ops.tunesmith.token_losses_(logits, targets, losses, hits, scales, with_grad, *terms)
    else:
        _token_losses(logits, targets, losses, hits, scales, with_grad, *terms)


@functools.cache
def _kernel() -> Launch:
    """The triton kernel (triton comes with torch for CUDA on Linux), else plain torch."""
    try:
        from framework.build.losses.cross_entropy_kernel import token_losses_on_gpu
    except ImportError:
        return _token_losses
    return token_losses_on_gpu


_LIBRARY = torch.library.Library("tunesmith", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "token_losses_(Tensor(a!) logits, Tensor targets, Tensor(b!) losses, Tensor(c!)? hits, Tensor? scales, "
    "bool with_grad, float smoothing, float z_loss) -> ()"
)
_LIBRARY.impl("token_losses_", lambda *arguments: _kernel()(*arguments), "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("token_losses_", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


def _token_losses(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    hits: Tensor | None,
    scales: Tensor | None,
    with_grad: bool,
    smoothing: float,
    z_loss: float,
) -> None:
    """The same in plain torch, at least in float32."""
    supervised = targets != IGNORED
    picked = targets.clamp_min(0).unsqueeze(1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sums = scores.logsumexp(1)
    found = log_sums - (1 - smoothing) * scores.gather(1, picked).squeeze(1)
    if smoothing:
        found -= smoothing * scores.mean(1)
    if z_loss:
        found += z_loss * log_sums.square()
    losses.copy_(found.where(supervised, 0))
    if hits is not None:
        hits.copy_(scores.argmax(1) == targets)
    if not with_grad:
        return
    scores.sub_(log_sums.unsqueeze(1)).exp_()
    if z_loss:
        scores.mul_((1 + 2 * z_loss * log_sums).unsqueeze(1))
    if smoothing:
        scores.sub_(smoothing / scores.shape[1])
    scores.scatter_add_(1, picked, torch.full_like(picked, smoothing - 1, dtype=scores.dtype))
    scores.mul_((supervised if scales is None else scales * supervised).unsqueeze(1))
    if scores is not logits:
        logits.copy_(scores)

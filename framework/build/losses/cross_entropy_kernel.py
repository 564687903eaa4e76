"""Triton kernel of `token_losses`: one program per token, which reads its logits twice and writes their gradient
once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8
"""Logits that a program reads at once, and its warps: of 18 pairs, as fast as any for vocabularies of 128,256 and
151,936 on an H200 (benchmarks/results/token_losses_h200.json)."""


@triton.jit  # type: ignore[untyped-decorator]
def _ignore(row, loss, hit, vocabulary, GRAD: tl.constexpr, HITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unsupervised token: no loss, no hit, and a gradient of zeros."""
    tl.store(loss, 0.0)
    if HITS:
        tl.store(hit, 0)
    if GRAD:
        columns, nothing = tl.arange(0, BLOCK), tl.zeros([BLOCK], dtype=row.dtype.element_ty)
        for start in range(0, vocabulary, BLOCK):
            tl.store(row + start + columns, nothing, mask=start + columns < vocabulary)


@triton.jit  # type: ignore[untyped-decorator]
def _token_losses(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    hits,
    scales,
    vocabulary,
    smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
    GRAD: tl.constexpr,
    HITS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    row = logits + token * vocabulary
    columns = tl.arange(0, BLOCK)
    if target == -100:
        _ignore(row, losses + token, hits + token, vocabulary, GRAD, HITS, BLOCK)
        return
    # an invalid target gives NaN, which stops the run
    target_score = tl.load(row + target, mask=(target >= 0) & (target < vocabulary), other=float("nan")).to(tl.float32)
    highest = -float("inf")
    total = 0.0
    sum_of_scores = 0.0
    likeliest = 0
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        score = tl.load(row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if SMOOTHED:
            sum_of_scores += tl.sum(tl.where(inside, score, 0.0), 0)
        if HITS:
            high, at = tl.max(score, 0, return_indices=True)
            likeliest = tl.where(high > highest, start + at, likeliest)
        else:
            high = tl.max(score, 0)
        high = tl.maximum(highest, high)
        shift = tl.where(high == -float("inf"), 0.0, high)  # for a block without a finite logit
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(score - shift), 0)
        highest = high
    log_sum = highest + tl.log(total)
    loss = log_sum - (1.0 - smoothing) * target_score + z_loss * log_sum * log_sum
    if SMOOTHED:
        loss -= smoothing * (sum_of_scores / vocabulary)
    tl.store(losses + token, loss)
    if HITS:
        tl.store(hits + token, (likeliest == target).to(tl.int8))
    if GRAD:
        scale = 1.0
        if SCALED:
            scale = tl.load(scales + token)
        tl.debug_barrier()  # every thread has read the target's logit
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            score = tl.load(row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            slope = tl.exp(score - log_sum) * (1.0 + 2.0 * z_loss * log_sum)
            slope -= tl.where(start + columns == target, 1.0 - smoothing, 0.0) + smoothing / vocabulary
            tl.store(row + start + columns, (slope * scale).to(row.dtype.element_ty), mask=inside)


def token_losses_on_gpu(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    hits: Tensor | None,
    scales: Tensor | None,
    with_grad: bool,
    smoothing: float,
    z_loss: float,
) -> None:
    """Launch the kernel over one chunk. All tensors contiguous; float32 sums, whatever the dtype of the logits."""
    tokens, vocabulary = logits.shape
    _token_losses[(tokens,)](
        logits,
        targets,
        losses,
        losses if hits is None else hits.view(dtype=torch.int8),
        losses if scales is None else scales,
        vocabulary,
        smoothing,
        z_loss,
        SMOOTHED=smoothing > 0,
        GRAD=with_grad,
        HITS=hits is not None,
        SCALED=scales is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )

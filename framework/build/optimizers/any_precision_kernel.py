"""The update of AnyPrecisionAdamW in one pass on a GPU: reads and writes each tensor once, no temporaries."""

import triton
import triton.language as tl

from framework.build.optimizers.any_precision import Update

BLOCK = 2048
"""Elements of one program; measured as `adamw_tri` of the prototype on an H100 (SPEED.md: 6.7 ms for 1.24B)."""


@triton.jit
def _rounded(value, noise):  # type: ignore[no-untyped-def]
    """float32 -> bfloat16, stochastically: the low 16 bits of `noise` are added to those that are cut off."""
    bits = (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["seed", "rate", "correction1", "correction2"])  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    firsts,
    seconds,
    compensations,
    count,
    rate,
    decay,
    beta1,
    beta2,
    epsilon,
    correction1,
    correction2,
    seed,
    KAHAN: tl.constexpr,
    FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gradient = tl.load(gradients + at, mask=inside, other=0).to(tl.float32)
    first = tl.load(firsts + at, mask=inside, other=0).to(tl.float32)
    second = tl.load(seconds + at, mask=inside, other=0).to(tl.float32)
    weight = tl.load(weights + at, mask=inside, other=0).to(tl.float32)
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient * gradient
    moved = -rate * (first / correction1) / (tl.sqrt(second / correction2) + epsilon) - rate * decay * weight
    noise = tl.randint(seed, at.to(tl.int32)).to(tl.uint32, bitcast=True)
    tl.store(firsts + at, first.to(tl.bfloat16), mask=inside)
    tl.store(seconds + at, _rounded(second, noise >> 16), mask=inside)
    if KAHAN:
        moved += tl.load(compensations + at, mask=inside, other=0).to(tl.float32)
        rounded = (weight + moved).to(tl.bfloat16)
        tl.store(compensations + at, (moved - (rounded.to(tl.float32) - weight)).to(tl.bfloat16), mask=inside)
        tl.store(weights + at, rounded, mask=inside)
    elif FLOAT32:
        tl.store(weights + at, weight + moved, mask=inside)
    else:
        tl.store(weights + at, _rounded(weight + moved, noise), mask=inside)


def update_on_gpu(update: Update) -> None:
    """Launch the kernel over one parameter. All tensors contiguous; at most 2^31 elements draw different bits."""
    weight, gradient, first, second, *compensation = update.tensors
    count = weight.numel()
    _step[(triton.cdiv(count, BLOCK),)](
        weight,
        gradient,
        first,
        second,
        compensation[0] if compensation else first,
        count,
        update.rate,
        update.decay,
        update.beta1,
        update.beta2,
        update.epsilon,
        update.correction1,
        update.correction2,
        update.seed,
        KAHAN=bool(compensation),
        FLOAT32=weight.element_size() == 4,
        BLOCK=BLOCK,
        num_warps=8,
    )

"""The update of AnyPrecisionAdamW on a GPU: all parameters in one launch, each tensor read and written once."""

import triton
import triton.language as tl

from framework.build.optimizers.any_precision import CHUNK, FIRST_NOISE, Numbers, Update
from framework.build.optimizers.codes import BLOCK as SCALED_BLOCK
from framework.build.optimizers.codes import DROPPED, FIRST, LARGEST, SECOND, TINIEST_SCALE
from framework.build.ranks import local_part
from framework.build.seeds import FACTORS, SPREAD

_COLUMNS = tl.constexpr(10)
_CHUNK = tl.constexpr(CHUNK)
_WIDTH = tl.constexpr(SCALED_BLOCK)
_ROWS = tl.constexpr(8)
"""Blocks of _WIDTH elements that a program holds at once: one for each of its 8 warps, 8 elements a thread, of which a
bfloat16 load takes 16 bytes."""
_SPREAD, _FACTOR1, _FACTOR2 = tl.constexpr(SPREAD), tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_FIRST_NOISE = tl.constexpr(FIRST_NOISE)
_DROPPED = tl.constexpr(DROPPED)
_LARGEST, _TINIEST = tl.constexpr(LARGEST), tl.constexpr(TINIEST_SCALE)
_FIRST_SHIFT, _FIRST_CODE = tl.constexpr(FIRST.shift), tl.constexpr(FIRST.largest)
_SECOND_SHIFT, _SECOND_CODE = tl.constexpr(SECOND.shift), tl.constexpr(SECOND.largest)


@triton.jit
def _random_bits(at, seed):  # type: ignore[no-untyped-def]
    """`seeds.random_bits` of the elements `at`."""
    bits = at.to(tl.uint32) * _SPREAD + seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * _FACTOR1
    bits = (bits ^ (bits >> 15)) * _FACTOR2
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(value, noise):  # type: ignore[no-untyped-def]
    """Stochastic float32 -> bfloat16: the low 16 bits of `noise` are added to those that are cut off."""
    bits = (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(codes, scales, LARGEST_CODE: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`codes.decode`: uint8 [rows, width] and float32 [rows] -> float32 [rows, width]. Unsigned codes have no bit above
    LARGEST_CODE."""
    bits = codes.to(tl.uint32)
    values = ((bits & LARGEST_CODE) << _DROPPED).to(tl.float32, bitcast=True) * SHIFT
    return tl.where(bits > LARGEST_CODE, -values, values) * scales[:, None]


@triton.jit
def _scales_of(values):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.max(tl.abs(values), axis=1) * (1 / _LARGEST), _TINIEST)


@triton.jit  # type: ignore[untyped-decorator]
def _magnitudes(values, scales, noise, LARGEST_CODE: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`codes.encode` without the sign, as uint32."""
    scaled = tl.abs(values * (1 / scales)[:, None]) * (1 / SHIFT)
    bits = scaled.to(tl.uint32, bitcast=True) + (noise >> (32 - _DROPPED))
    return tl.minimum(bits >> _DROPPED, LARGEST_CODE)


@triton.jit
def _keep_first(values, noise, codes, scales, inside, within):  # type: ignore[no-untyped-def]
    own = _scales_of(values)
    coded = _magnitudes(values, own, noise * _FIRST_NOISE, _FIRST_CODE, _FIRST_SHIFT)
    tl.store(codes, tl.where(values < 0, coded | 128, coded).to(tl.uint8), mask=inside)
    tl.store(scales, own, mask=within)


@triton.jit
def _keep_second(values, noise, codes, scales, inside, within):  # type: ignore[no-untyped-def]
    own = _scales_of(values)
    coded = _magnitudes(values, own, noise, _SECOND_CODE, _SECOND_SHIFT)
    coded = tl.where((values > 0) & (coded == 0), 1, coded)
    tl.store(codes, coded.to(tl.uint8), mask=inside)
    tl.store(scales, own, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _at(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradients, firsts, seconds, compensations, first_scales, second_scales, seed, begin, end,
    scale, rate, decay, beta1, beta2, epsilon, inverse1, inverse2,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, KAHAN: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update the elements `begin` to `begin` + _ROWS x _WIDTH. ALIGNED: all of them are before `end`, at addresses for
    16-byte loads. All loads come first, so that their latencies overlap."""
    rows = tl.arange(0, _ROWS)
    at = begin + rows[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    inside = None if ALIGNED else at < end
    state: tl.constexpr = tl.uint8 if CODED else tl.bfloat16
    weights = _at(weights, WEIGHT, ALIGNED) + at
    firsts = _at(firsts, state, ALIGNED) + at
    seconds = _at(seconds, state, ALIGNED) + at
    gradient = tl.load(_at(gradients, GRADIENT, ALIGNED) + at, mask=inside)
    first = tl.load(firsts, mask=inside)
    second = tl.load(seconds, mask=inside)
    weight = tl.load(weights, mask=inside)
    if KAHAN:
        compensations = _at(compensations, tl.bfloat16, ALIGNED) + at
        compensation = tl.load(compensations, mask=inside)
    if CODED:
        block = begin // _WIDTH + rows
        within = block * _WIDTH < end
        first_scales = _at(first_scales, tl.float32, False) + block
        second_scales = _at(second_scales, tl.float32, False) + block
        first_scale = tl.load(first_scales, mask=within)
        second_scale = tl.load(second_scales, mask=within)
        first = _decoded(first, first_scale, _FIRST_CODE, _FIRST_SHIFT)
        second = _decoded(second, second_scale, _SECOND_CODE, _SECOND_SHIFT)
    noise = _random_bits(at, seed)
    gradient = gradient.to(tl.float32) * scale
    weight = weight.to(tl.float32)
    first = beta1 * first.to(tl.float32) + (1 - beta1) * gradient
    second = beta2 * second.to(tl.float32) + (1 - beta2) * gradient * gradient
    moved = -rate * inverse1 * first / (tl.sqrt(second * inverse2) + epsilon) - rate * decay * weight
    if CODED:
        if not ALIGNED:
            first = tl.where(inside, first, 0.0)
            second = tl.where(inside, second, 0.0)
        _keep_first(first, noise, firsts, first_scales, inside, within)
        _keep_second(second, noise, seconds, second_scales, inside, within)
    else:
        tl.store(firsts, first.to(tl.bfloat16), mask=inside)
        tl.store(seconds, _rounded(second, noise >> 16), mask=inside)
    if KAHAN:
        moved += compensation.to(tl.float32)
        rounded = (weight + moved).to(tl.bfloat16)
        tl.store(compensations, (moved - (rounded.to(tl.float32) - weight)).to(tl.bfloat16), mask=inside)
        tl.store(weights, rounded, mask=inside)
    elif tl.bfloat16 == WEIGHT:
        tl.store(weights, _rounded(weight + moved, noise), mask=inside)
    else:
        tl.store(weights, (weight + moved).to(WEIGHT), mask=inside)


@triton.jit(noinline=True)  # type: ignore[untyped-decorator]
def _update_edge(  # type: ignore[no-untyped-def]
    weights, gradients, firsts, seconds, compensations, first_scales, second_scales, seed, begin, end,
    scale, rate, decay, beta1, beta2, epsilon, inverse1, inverse2,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, KAHAN: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """The end of a tensor, or a misaligned one: a separate branch, so that it needs no registers in the main code."""
    _update(
        weights, gradients, firsts, seconds, compensations, first_scales, second_scales, seed, begin, end,
        scale, rate, decay, beta1, beta2, epsilon, inverse1, inverse2, WEIGHT, GRADIENT, KAHAN, CODED, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["updates", "rate", "inverse1", "inverse2"])  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    table, updates, grad_scale, found_inf, rate, decay, beta1, beta2, epsilon, inverse1, inverse2,
    SCALED: tl.constexpr, GUARDED: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, KAHAN: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    low = 0
    high = updates
    while high - low > 1:  # the last update whose first chunk is not after this one
        middle = (low + high) // 2
        if tl.load(table + middle * _COLUMNS + 8) <= chunk:
            low = middle
        else:
            high = middle
    table += low * _COLUMNS
    begin = (chunk - tl.load(table + 8)) * _CHUNK
    end = tl.minimum(begin + _CHUNK, tl.load(table + 7))
    if GUARDED:
        end = tl.where(tl.load(found_inf) != 0, begin, end)
    scale = 1.0
    if SCALED:
        scale = 1 / tl.load(grad_scale)
    weights = tl.load(table)
    gradients = tl.load(table + 1)
    firsts = tl.load(table + 2)
    seconds = tl.load(table + 3)
    compensations = tl.load(table + 4)
    first_scales = tl.load(table + 5)
    second_scales = tl.load(table + 6)
    seed = tl.load(table + 9)
    is_aligned = ((weights | gradients | firsts | seconds | compensations) & 15) == 0
    for offset in range(0, _CHUNK, _ROWS * _WIDTH):
        at = tl.multiple_of(begin + offset, _WIDTH)
        if is_aligned & (at + _ROWS * _WIDTH <= end):
            _update(
                weights, gradients, firsts, seconds, compensations, first_scales, second_scales, seed, at, end,
                scale, rate, decay, beta1, beta2, epsilon, inverse1, inverse2, WEIGHT, GRADIENT, KAHAN, CODED, True,
            )  # fmt: skip
        elif at < end:
            _update_edge(
                weights, gradients, firsts, seconds, compensations, first_scales, second_scales, seed, at, end,
                scale, rate, decay, beta1, beta2, epsilon, inverse1, inverse2, WEIGHT, GRADIENT, KAHAN, CODED,
            )  # fmt: skip


_DTYPES = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16, "torch.float32": tl.float32}


def launch(table, chunks: int, update: Update, numbers: Numbers) -> None:  # type: ignore[no-untyped-def]
    """Update all rows of the table, which are of the same kind as `update`. At most 2^32 elements draw different
    bits."""
    scale, found = numbers.grad_scale, numbers.found_inf
    _step[(chunks,)](
        table,
        table.shape[0],
        table if scale is None else local_part(scale),
        table if found is None else local_part(found),
        numbers.rate,
        numbers.decay,
        numbers.beta1,
        numbers.beta2,
        numbers.epsilon,
        1 / numbers.correction1,
        1 / numbers.correction2,
        SCALED=scale is not None,
        GUARDED=found is not None,
        WEIGHT=_DTYPES[str(update.weight.dtype)],
        GRADIENT=_DTYPES[str(update.gradient.dtype)],
        KAHAN=update.compensation is not None,
        CODED=update.first_scales is not None,
        num_warps=8,
    )

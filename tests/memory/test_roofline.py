"""Seconds of single kernels."""

import pytest

from framework.memory.roofline import CALIBRATED, kernel_seconds
from framework.memory.trace import Launcher, Operation
from framework.schema.gpu import GPUParams

CARD = GPUParams(
    name="card", multiprocessors=100, bandwidth_bytes_per_second=1e12, fp32_flops=1e13, bf16_flops=1e14, fp16_flops=1e14
)


def product(rows: int, columns: int, inner: int, dtype: str = "bfloat16") -> Operation:
    flops = 2 * rows * columns * inner
    return Operation("mm", "backward", flops, 2, dtype, (1, rows, columns, inner))


def arithmetic(operation: Operation, card: GPUParams = CARD) -> float:
    return kernel_seconds(operation, card)[0]


def test_a_large_product_takes_its_arithmetic_at_the_rate_of_its_dtype() -> None:
    # 8192 x 8192 of tiles of 128 x 256 are 2,048 tiles: 20.48 waves of 100, so 21
    waves = 20.48 / 21
    for dtype, rate, share in (
        ("bfloat16", 1e14, CALIBRATED.product),
        ("float32", 1e13, CALIBRATED.product_float32),
    ):
        expected = 2 * 8192**3 / (rate * share * waves) + CALIBRATED.product_seconds
        assert arithmetic(product(8192, 8192, 8192, dtype)) == pytest.approx(expected, rel=1e-6)


def test_products_of_eight_bits_run_at_the_rate_of_the_card_for_them() -> None:
    card = CARD.model_copy(update={"fp8_flops": 2e14})
    half, eighth = (arithmetic(product(8192, 8192, 8192, dtype), card) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert eighth == pytest.approx(half / 2, rel=0.02)


def test_matrices_of_odd_rows_multiply_at_a_sixth_of_the_rate_in_half_precision_alone() -> None:
    for dtype, slower in (("bfloat16", CALIBRATED.product / CALIBRATED.product_odd), ("float32", 1.0)):
        plain = product(8192, 8192, 8192, dtype)
        odd, even = (arithmetic(plain._replace(is_aligned=aligned)) for aligned in (False, True))
        assert odd - CALIBRATED.product_seconds == pytest.approx(slower * (even - CALIBRATED.product_seconds))


def test_a_measured_card_has_its_own_start_of_a_product() -> None:
    slow = CARD.model_copy(update={"product_seconds": 1e-3})
    assert arithmetic(product(64, 64, 64), slow) - arithmetic(product(64, 64, 64)) == pytest.approx(
        1e-3 - CALIBRATED.product_seconds
    )


def test_a_last_wave_that_is_not_full_costs_a_whole_one() -> None:
    def seconds(columns: int) -> float:
        return arithmetic(product(1280, columns, 8192))

    assert seconds(256 * 10) == pytest.approx(seconds(256 * 9), rel=0.1)
    assert seconds(256 * 11) > 1.15 * seconds(256 * 10)


def test_attention_of_narrow_heads_reaches_less() -> None:
    def attention(width: int) -> Operation:
        return Operation("_scaled_dot_product_cudnn_attention", "forward", 10**13, 1, "bfloat16", (8, 512, 512, width))

    wide, narrow, wider = (arithmetic(attention(width)) - CALIBRATED.product_seconds for width in (128, 64, 256))
    assert narrow == pytest.approx(wide * 2**CALIBRATED.attention_narrow)
    assert wider == wide


@pytest.mark.parametrize(
    ("name", "launcher", "tensors", "share"),
    [
        ("mul", Launcher.TORCH, 1, CALIBRATED.bandwidth),
        ("_softmax", Launcher.TORCH, 1, CALIBRATED.reduction_bandwidth),
        ("_foreach_mul_", Launcher.TORCH, 9, CALIBRATED.update_bandwidth),
        ("_foreach_mul_", Launcher.TORCH, 1, CALIBRATED.update_bandwidth),
        ("_rms_norm_forward_kernel", Launcher.TRITON, 1, CALIBRATED.triton_bandwidth),
        ("generated", Launcher.COMPILED, 1, CALIBRATED.compiled_bandwidth),
        ("unpack", Launcher.BITSANDBYTES, 1, CALIBRATED.unpack_bandwidth),
        ("bitsandbytes_update_8", Launcher.BITSANDBYTES, 1, CALIBRATED.coded_bandwidth),
    ],
)
def test_other_kernels_take_their_traffic_at_a_share_by_what_they_do(
    name: str, launcher: Launcher, tensors: int, share: float
) -> None:
    operation = Operation(name, "forward", 0, 10**10, "bfloat16", (), launcher, tensors)
    assert kernel_seconds(operation, CARD) == (0.0, pytest.approx(1e10 / (1e12 * share)))


def test_elements_that_are_loaded_one_by_one_take_as_long_whatever_their_bytes() -> None:
    """2.7e9 elements a second on each of 100 multiprocessors, unless the bytes take longer."""
    for moved, elements, seconds in ((10**8, 27 * 10**8, 0.01), (9 * 10**10, 27 * 10**8, 0.1), (9 * 10**9, 0, 0.01)):
        call = Operation("mul", "forward", 0, moved, "bfloat16", one_by_one=elements)
        assert kernel_seconds(call, CARD)[1] == pytest.approx(seconds)


def test_narrow_float32_heads_reach_less_of_the_rate() -> None:
    wide, narrow = (
        Operation("_scaled_dot_product_efficient_attention", "forward", 10**12, 8, "float32", (8, 1024, 1024, width))
        for width in (128, 64)
    )
    start = CALIBRATED.product_seconds
    assert arithmetic(wide) == pytest.approx(10**12 / (1e13 * 0.82) + start)
    assert arithmetic(narrow) == pytest.approx(10**12 / (1e13 * 0.82 * 0.5**1.1) + start)


@pytest.mark.parametrize(
    ("name", "phase", "expected"),
    [
        ("sum", "loss", 1e9 / (1e12 * 0.8)),
        ("sum", "forward", 1e9 / (1e12 * 0.33)),
        ("sum", "backward", 1e9 / (1e12 * 0.33)),
        ("native_layer_norm", "forward", 1e9 / (1e12 * 0.33)),
        ("native_layer_norm_backward", "backward", 1e9 / (1e12 * 0.23)),
        ("sort", "forward", 1e9 / (1e12 * 0.8) + 20e-6),
        ("index_put", "backward", 1e9 / (1e12 * 0.8) + 20e-6),
    ],
)
def test_sums_over_rows_are_slower_than_those_within_one_and_a_sort_takes_several_kernels(
    name: str, phase: str, expected: float
) -> None:
    assert kernel_seconds(Operation(name, phase, 0, 10**9, ""), CARD)[1] == pytest.approx(expected)


def test_a_grouped_product_reaches_about_half_of_the_rate_of_a_plain_one() -> None:
    plain = product(8192, 8192, 8192)
    start, ratio = CALIBRATED.product_seconds, CALIBRATED.product / CALIBRATED.product_grouped
    assert arithmetic(plain._replace(name="_grouped_mm")) - start == pytest.approx(ratio * (arithmetic(plain) - start))
    assert 1.7 < ratio < 2

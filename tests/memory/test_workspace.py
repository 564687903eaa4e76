"""Hidden buffers of kernels, against their sources."""

import json
from pathlib import Path

import pytest

from framework.memory.workspace import column_sum, embedding_backward, foreach_norm, logsumexp

PROBED = json.loads((Path(__file__).parents[1] / "calibration" / "h100_kernels.json").read_text())


@pytest.mark.parametrize(("tokens", "rows", "width", "measured"), PROBED["embedding_dense_backward"])
def test_embedding_backward_is_as_measured(tokens: int, rows: int, width: int, measured: int) -> None:
    assert sum(embedding_backward(tokens, rows, width)) == measured


@pytest.mark.parametrize(("rows", "columns", "measured"), PROBED["sum_over_rows"])
def test_a_sum_over_rows_is_as_measured(rows: int, columns: int, measured: int) -> None:
    assert sum(column_sum(rows, columns, 2, 132, 2048)) == measured


def test_a_sum_in_float64_has_partial_sums_in_float64() -> None:
    buffers, in_float64 = column_sum(8192, 1024, 4, 132, 2048), column_sum(8192, 1024, 8, 132, 2048)
    assert in_float64 == [2 * buffers[0], buffers[1]]


def test_a_short_sum_splits_nothing() -> None:
    assert column_sum(8, 1 << 20, 2, 132, 2048) == []


@pytest.mark.parametrize(("rows", "columns", "measured"), PROBED["logsumexp"])
def test_logsumexp_is_as_measured(rows: int, columns: int, measured: int) -> None:
    assert sum(logsumexp(rows * columns, rows, 4)) == measured


def test_embedding_backward_sorts_only_above_3072_indices() -> None:
    assert embedding_backward(3072, 1000, 64) == []
    sizes = embedding_backward(8192, 128256, 2048)
    assert max(sizes) == 4 * 2048 * (819 + 8192), "fp32 partial sums: one row per segment, and one per ten indices"
    assert sum(sizes) - max(sizes) == 8 * (3 * 8192 + 2 + 2 * 8192 + 819 + 8192)


def test_a_small_table_bounds_the_segments() -> None:
    assert embedding_backward(8192, 1000, 64)[-1] == 4 * 64 * (819 + 1000)


def test_foreach_norm_has_one_partial_per_tensor_and_chunk_of_the_longest() -> None:
    assert foreach_norm([10, 65536 * 3 + 1]) == [4 * 2 * 4]
    assert foreach_norm([]) == []

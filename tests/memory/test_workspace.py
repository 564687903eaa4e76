"""Hidden buffers of kernels, against their sources."""

from framework.memory.workspace import embedding_backward, foreach_norm


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

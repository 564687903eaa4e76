"""What eager CUDA kernels allocate for themselves and free before they return. A dispatch mode cannot see it.

Each function names the kernel whose source it follows, and returns the sizes of the buffers in the order they are made.
"""

from collections.abc import Sequence

FOREACH_CHUNK = 65536
"""Elements per chunk of the multi-tensor kernels (kChunkSize in MultiTensorApply.cuh)."""
EMBEDDING_ROWS_PER_THREAD = 10
"""NROWS_PER_THREAD in EmbeddingBackwardKernel.cu."""
EMBEDDING_UNSORTED_LIMIT = 3072
"""Up to this many indices embedding_dense_backward_cuda adds with one kernel and does not sort."""
EMBEDDING_WARP = 32


def embedding_backward(indices: int, rows: int, width: int) -> list[int]:
    """embedding_dense_backward_cuda (Embedding.cu) and embedding_backward_cuda_kernel (EmbeddingBackwardKernel.cu).

    `indices` tokens looked up in a table of `rows` x `width`: sorted and original indices (int64), segment offsets,
    two arrays of partials per segment, offsets of the partial segments, and the fp32 partial sums.
    """
    if indices <= EMBEDDING_UNSORTED_LIMIT:
        return []
    segments = min(indices, rows)
    partials = indices // EMBEDDING_ROWS_PER_THREAD + segments
    return [8 * indices] * 3 + [8 * segments] * 2 + [8 * partials, 4 * partials * width]


def foreach_norm(elements: Sequence[int]) -> list[int]:
    """foreach_tensor_norm_cuda (ForeachReduceOp.cu): one fp32 partial per tensor and chunk of the longest tensor."""
    chunks = max((-(-count // FOREACH_CHUNK) for count in elements), default=0)
    return [4 * len(elements) * chunks] if chunks else []


def logsumexp(elements: int, element_bytes: int) -> list[int]:
    """logsumexp_out_impl (ReduceOps.cpp) computes (self - max).exp_() in a buffer as large as its input."""
    return [elements * element_bytes]


def sort(elements: int) -> list[int]:
    """Radix sort of int64 keys and values (Sort.cu, cub): alternate buffers for both."""
    return [16 * elements]

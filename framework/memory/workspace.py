"""Workspaces of eager CUDA kernels, allocated and freed inside a call, which a dispatch mode cannot see.

Each function names the kernel whose source it follows, and returns the sizes of the buffers in order of allocation.
"""

import math
from collections.abc import Sequence

FOREACH_CHUNK = 65536
"""Elements per chunk of the multi-tensor kernels (kChunkSize in MultiTensorApply.cuh)."""
CUSOLVER_CONTEXT = 98 << 20
"""Memory of cuSOLVER outside torch's allocator after a matrix decomposition: the same for OLoRA, PiSSA and GaLore on an
H200 (torch 2.11+cu130, 2026-11; benchmarks/results/levers_h200.json and drawn_single_h200.json)."""
EMBEDDING_ROWS_PER_THREAD = 10
"""NROWS_PER_THREAD in EmbeddingBackwardKernel.cu."""
EMBEDDING_UNSORTED_LIMIT = 3072
"""Up to this many indices embedding_dense_backward_cuda uses one kernel without sorting."""


def embedding_backward(indices: int, rows: int, width: int) -> list[int]:
    """embedding_dense_backward_cuda (Embedding.cu) and embedding_backward_cuda_kernel (EmbeddingBackwardKernel.cu).

    `indices` tokens looked up in a table of `rows` x `width`: sorted and original indices (int64), segment offsets,
    two arrays of partials per segment, offsets of the partial segments, and the fp32 partial sums.
    """
    if indices <= EMBEDDING_UNSORTED_LIMIT:
        return []
    segments = min(indices, rows)
    partials = indices // EMBEDDING_ROWS_PER_THREAD + segments
    return [8 * indices] * 3 + [8] * 2 + [8 * segments] * 2 + [8 * partials, 4 * partials * width]


def foreach_norm(elements: Sequence[int]) -> list[int]:
    """foreach_tensor_norm_cuda (ForeachReduceOp.cu): one fp32 partial per tensor and chunk of the longest tensor."""
    chunks = max((-(-count // FOREACH_CHUNK) for count in elements), default=0)
    return [4 * len(elements) * chunks] if chunks else []


def logsumexp(elements: int, rows: int, element_bytes: int) -> list[int]:
    """logsumexp_out_impl (ReduceOps.cpp): the maxima, and (self - max).exp_() in a buffer of the input's size."""
    return [rows * element_bytes, elements * element_bytes]


CUBLASLT_WORKSPACE = 1 << 20
"""cuBLASLt keeps this per handle and stream (CUDABlas.cpp); measured with torch 2.11 on an H100."""


def safe_softmax(elements: int, rows: int) -> list[int]:
    """_safe_softmax (SoftMax.cpp), used by attention's math path: masks of -inf elements and of rows with only these.

    With these buffers the reserved bytes of three of the four measured rows of that path are exact.
    """
    return [elements, rows]


def sort(elements: int) -> list[int]:
    """Radix sort of int64 keys and values (Sort.cu, cub): alternate buffers for both and for the positions."""
    return [24 * elements]


REDUCTION_THREADS = 512
"""MAX_NUM_THREADS of a block in Reduce.cuh."""
WARP = 32
REDUCTION_LEAST, REDUCTION_MOST = 16, 256
"""min_values_per_thread and max_values_per_thread in Reduce.cuh."""


_INDEXED_BYTES = (1 << 31) - 1
"""Range of a kernel with 32-bit indices in bytes (canUse32BitIndexMath)."""


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """Maximum threads per multiprocessor (CUDA C++ programming guide, table of compute capabilities)."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) else 2048


def column_sum(rows: int, columns: int, element_bytes: int, multiprocessors: int, threads: int) -> list[int]:
    """Sum of a `rows` x `columns` matrix over its rows: the gradient of a bias, or of a norm's weight.

    Follows setReduceConfig (Reduce.cuh) for accumulation in float32, of float64 in itself: if few outputs leave
    multiprocessors idle, the rows are split over blocks, which combine in a buffer of `columns` times block width times
    number of splits. `threads` is the maximum per multiprocessor. Exact for every sum of benchmarks/probe_kernels.py;
    float64 follows from one allocated peak on an H200 (2026-11-30, the row `eva` of benchmarks/features_card.py).
    """
    summed = max(4, element_bytes)
    if rows * columns * element_bytes > _INDEXED_BYTES:  # split into halves, accumulated in float32 (SplitUntil32Bit)
        halves = column_sum(-(-rows // 2), columns, element_bytes, multiprocessors, threads)
        return halves if element_bytes == summed or len(halves) == 3 else [4 * columns, *halves]
    vector = math.gcd(columns, 4)
    most = REDUCTION_THREADS // vector
    # The largest power of two up to `size`
    across, along = (min(1 << (size.bit_length() - 1), most) for size in (columns // vector, rows))
    height = min(along, most // min(across, WARP))
    width = min(across, most // height)
    each = -(-rows // height)
    if rows < min(height * REDUCTION_LEAST, REDUCTION_MOST) or each < REDUCTION_MOST:
        return []
    grid, wanted = -(-columns // (vector * width)), multiprocessors * (threads // (width * height))
    if grid > wanted:
        return []
    splits = max(min(-(-wanted // grid), -(-each // REDUCTION_LEAST)), -(-each // REDUCTION_MOST))
    return [summed * columns * width * vector * splits, 4 * grid] if splits > 1 else []

import pytest
import torch

from framework.memory.cards import read_card
from framework.run.rehearsal.kernels import aten, count_flops, group_shape, is_aligned
from framework.run.rehearsal.tracker import Tracker
from framework.schema.gpu import GPUParams


@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_flops_with_shared_key_heads(key_heads):
    """The count depends only on query heads, and is right on every supported torch."""
    query = torch.empty(2, 8, 64, 32, device="meta")
    key = value = torch.empty(2, key_heads, 64, 32, device="meta")
    forward = count_flops(aten._scaled_dot_product_cudnn_attention, (query, key, value), {}, [query])
    backward = count_flops(aten._scaled_dot_product_cudnn_attention_backward, (query, query, key, value), {}, [query])
    assert forward == 2 * 2 * 8 * 64 * 64 * (32 + 32)
    assert backward == 5 * forward // 2


@pytest.mark.parametrize(("vocabulary", "aligned"), [(50257, False), (50258, True)])
def test_the_head_of_an_odd_vocabulary_multiplies_matrices_of_odd_rows(vocabulary, aligned):
    """Forward and both gradients; rows of a batch may be odd, as no matrix has them side by side."""
    hidden = torch.empty(2047, 64, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(vocabulary, 64, device="meta", dtype=torch.bfloat16)
    gradient = torch.empty(2047, vocabulary, device="meta", dtype=torch.bfloat16)
    for left, right in ((hidden, weight.t()), (gradient, weight), (gradient.t(), hidden)):
        assert is_aligned(aten.mm, (left, right)) is aligned
    bias = torch.empty(vocabulary, device="meta", dtype=torch.bfloat16)
    assert is_aligned(aten.addmm, (bias, hidden, weight.t())) is aligned
    assert is_aligned(aten.mul, (gradient, gradient))


def on_card(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("call", "elements"),
    [
        (lambda: torch.mul(on_card(8, 64), on_card(8, 64)), 0),
        (lambda: torch.mul(on_card(8, 64), 2.0), 0),
        (lambda: torch.mul(on_card(8, 64), torch.ones(())), 0),  # a number on the host
        (lambda: torch.mul(on_card(8, 64), on_card()), 512),
        (lambda: torch.mul(on_card(8, 64), on_card(64)), 512),
        (lambda: torch.mul(on_card(8, 64), on_card(8, 1)), 512),
        (lambda: torch.mul(on_card(64, 8).t(), on_card(64, 8).t()), 0),
        (lambda: torch.mul(on_card(64, 8).t(), on_card(8, 64)), 512),
        (lambda: torch.mul(on_card(8, 1, 64), on_card(8, 64).unsqueeze(1)), 0),
        (lambda: torch.nn.functional.silu(on_card(8, 128).chunk(2, -1)[0]), 512),
        (lambda: on_card(8, 128).chunk(2, -1)[0].mul_(2), 512),
        (lambda: on_card(8, 64).masked_fill_(on_card(8, 1, dtype=torch.bool), 0), 512),
        (lambda: on_card(8, 64).float(), 512),
        (lambda: on_card(8, 64, dtype=torch.float32).bfloat16(), 0),
        (lambda: on_card(8, 64, dtype=torch.float32) + on_card(8, 64), 512),
        (lambda: on_card(8, 64) == on_card(8, 64), 0),
        (lambda: on_card(8, 64).t().contiguous(), 512),
        (lambda: on_card(8, 64).sum(0), 0),
    ],
)
def test_elements_are_loaded_one_by_one_where_tensors_differ_or_have_gaps(call, elements):
    """What torch 2.11 ran on an H200: `vectorized_elementwise_kernel` or one that computes each element's offset."""
    tracker = Tracker(GPUParams.model_validate(read_card("h200_141gb")))
    with tracker:
        call()
    found = [operation.one_by_one for operation in tracker.trace.operations if operation.bytes]
    assert found[-1] == elements


def test_an_allocation_launches_nothing():
    tracker = Tracker(GPUParams.model_validate(read_card("h200_141gb")))
    with tracker:
        torch.empty_like(on_card(8, 64))
    assert {(call.bytes, call.flops) for call in tracker.trace.operations} == {(0, 0)}


def test_products_of_groups_share_rows_columns_or_what_is_summed_over():
    rows, weights, columns = on_card(96, 8), on_card(4, 8, 16), on_card(96, 16)
    assert group_shape(rows, weights, 4) == (1, 24, 16, 8)
    assert group_shape(rows.t(), columns, 4) == (1, 8, 16, 24)
    assert group_shape(weights, on_card(16, 96), 4) == (1, 8, 24, 16)

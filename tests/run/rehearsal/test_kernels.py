import pytest
import torch

from framework.run.rehearsal.kernels import aten, count_flops, is_aligned


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

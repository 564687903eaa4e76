import pytest
import torch

from framework.run.rehearsal.kernels import aten, count_flops


@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_flops_with_shared_key_heads(key_heads):
    """The count depends on query heads alone, and is right on every supported torch."""
    query = torch.empty(2, 8, 64, 32, device="meta")
    key = value = torch.empty(2, key_heads, 64, 32, device="meta")
    forward = count_flops(aten._scaled_dot_product_cudnn_attention, (query, key, value), {}, [query])
    backward = count_flops(aten._scaled_dot_product_cudnn_attention_backward, (query, query, key, value), {}, [query])
    assert forward == 2 * 2 * 8 * 64 * 64 * (32 + 32)
    assert backward == 5 * forward // 2

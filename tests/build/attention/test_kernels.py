"""Each kernel gives, of some of the keys, what the results over all of them are put together from."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.build.attention.kernels import Attended, choose_kernel
from framework.build.attention.ring_attention import _merged
from framework.errors import RequestError
from framework.run.rehearsal.fake_device import fake_device
from framework.schema.choices import SdpaBackend
from framework.schema.gpu import GPUParams

CUDA = pytest.mark.gpu
KINDS = [
    pytest.param("cpu", torch.float32, 1e-5, "flash"),
    pytest.param("cpu", torch.bfloat16, 1e-2, "flash"),
    pytest.param("cuda", torch.float32, 2e-3, "efficient", marks=CUDA),
    pytest.param("cuda", torch.bfloat16, 1e-2, "flash", marks=CUDA),
    pytest.param("cuda", torch.float16, 2e-3, "flash", marks=CUDA),
    pytest.param("cuda", torch.bfloat16, 1e-2, "cudnn", marks=CUDA),
    pytest.param("cuda", torch.bfloat16, 1e-2, "efficient", marks=CUDA),
]


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize(("device", "dtype", "exact", "name"), KINDS)
@pytest.mark.parametrize("tokens", [72, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_two_sets_of_keys_give_what_all_of_them_do(device, dtype, exact, name, tokens, kv_heads):
    """The last half of the tokens sees itself causally and the first half fully."""
    torch.manual_seed(0)
    half, scale = tokens // 2, 0.3
    query = torch.randn(2, 4, tokens, 64, device=device, dtype=dtype)
    both = torch.randn(tokens, 2, kv_heads, 128, device=device, dtype=dtype)  # as they are gathered
    key, value = both.permute(1, 2, 0, 3).chunk(2, -1)
    exactly = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    result = F.scaled_dot_product_attention(*exactly, is_causal=True, scale=scale, enable_gqa=True)
    asked = torch.randn_like(query)
    wanted = torch.autograd.grad(result[:, :, half:], exactly, asked[:, :, half:].double())

    kernel, late = choose_kernel(query, SdpaBackend(name)), slice(half, None)
    sets = [(late, True), (slice(half), False)]
    q, gradient = query[:, :, late], asked[:, :, late]
    parts = [kernel.forward(q, key[:, :, at], value[:, :, at], causal, scale) for at, causal in sets]
    (out, logarithm, rest), (more, of_more, _) = parts
    out, logarithm = _merged(out, logarithm, more, of_more)
    assert apart(out, result[:, :, late]) < exact
    of_query = torch.zeros_like(q, dtype=torch.float32)
    for at, causal in sets:
        k, v = key[:, :, at], value[:, :, at]
        of_q, of_k, of_v = kernel.backward(Attended(gradient, q, k, v, out.to(dtype), logarithm, rest), causal, scale)
        of_query += of_q
        assert apart(of_k, wanted[1][:, :, at]) < exact
        assert apart(of_v, wanted[2][:, :, at]) < exact
    assert apart(of_query, wanted[0][:, :, late]) < exact


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "able"),
    [
        ("9.0", torch.bfloat16, 128, "cudnn flash efficient"),
        ("8.0", torch.bfloat16, 128, "flash cudnn efficient"),
        ("8.0", torch.bfloat16, 256, "flash efficient"),
        ("9.0", torch.bfloat16, 512, "efficient"),
        ("9.0", torch.float32, 128, "efficient"),
        ("7.5", torch.float16, 64, "efficient"),
    ],
)
def test_the_kernel_is_one_that_the_card_has(capability, dtype, width, able):
    query, odd = (torch.empty(1, 1, 4, size, dtype=dtype, device="meta") for size in (width, 6))
    with fake_device(GPUParams(name="a card", capability=capability)):
        assert choose_kernel(query).name == able.split()[0]
        for backend in SdpaBackend:
            if backend in able.split():
                assert choose_kernel(query, backend).name == backend
            else:
                with pytest.raises(RequestError, match=f"{backend} on cuda cannot take heads of {width} numbers"):
                    choose_kernel(query, backend)
        with pytest.raises(RequestError, match="no kernel on cuda can take heads of 6 numbers"):
            choose_kernel(odd)

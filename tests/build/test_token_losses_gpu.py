"""The kernel of token losses on a card: right against float64, one kernel, no memory of its own."""

import pytest
import torch
import torch.nn.functional as F

from framework.build.losses.chunked_loss import chunked_cross_entropy
from framework.build.losses.cross_entropy import PLAIN, LossTerms, token_losses

pytestmark = pytest.mark.gpu
TOKENS, WORDS = 300, 50_257


@pytest.mark.parametrize("terms", [PLAIN, LossTerms(0.1, 1e-4)], ids=["plain", "smoothed, z-loss"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_the_kernel_against_float64(dtype, close, terms):
    torch.manual_seed(0)
    logits = (5 * torch.randn(TOKENS, WORDS, device="cuda")).to(dtype)
    targets = torch.randint(0, WORDS, (TOKENS,), device="cuda")
    targets[::7] = -100
    targets[1::7] = logits[1::7].argmax(1)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none", label_smoothing=terms.smoothing)
    expected = expected + terms.z_loss * exact.logsumexp(1).square().where(targets != -100, 0)
    expected.sum().backward()
    losses, hits = torch.full((TOKENS,), 7.0, device="cuda"), torch.zeros(TOKENS, dtype=torch.bool, device="cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    token_losses(logits, targets, losses, hits=hits, with_grad=True, terms=terms)
    assert torch.cuda.max_memory_allocated() == held
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # A target's gradient is a difference of numbers of at most 1, each of them rounded.
    torch.testing.assert_close(logits.double(), exact.grad, rtol=close, atol=1e-5 if dtype is torch.float32 else close)
    assert torch.equal(hits, exact.argmax(1) == targets)


@pytest.mark.parametrize(("weights", "autocast"), [(torch.bfloat16, None), (torch.float32, torch.bfloat16)])
def test_chunks_of_a_head_in_half_precision(weights, autocast):
    """Gradients are as near to float64 as those of whole logits, or twice as far: one rounding a chunk."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, 64, device="cuda", dtype=autocast or weights, requires_grad=True)
    weight = (torch.randn(WORDS, 64, device="cuda") / 8).to(weights).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,), device="cuda")
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*exact), targets, reduction="sum"), exact)
    with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        whole = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
        plain = torch.autograd.grad(whole, (hidden, weight))
        chunked = chunked_cross_entropy(hidden, weight, None, targets, 64)
        found = torch.autograd.grad(chunked, (hidden, weight))
    assert float(chunked.detach()) == pytest.approx(float(whole.detach()), rel=1e-4)
    for mine, other, right in zip(found, plain, expected, strict=True):
        assert (mine.double() - right).norm() < 2 * (other.double() - right).norm() + 1e-3 * right.norm()

"""Losses of tokens and gradients over their logits, against float64 by torch's own cross entropy."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from framework.build.losses.chunked_loss import chunked_counts, chunked_cross_entropy, chunked_log_probabilities
from framework.build.losses.cross_entropy import LossTerms, token_losses
from tests.grids import thinned

PRECISION = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half the last bit of what is between 1 and 2, and a little more in sums."""


def problem(dtype=torch.float64, tokens=11, width=6, vocabulary=37):
    """Inputs of a head, its weight and bias, and targets, two of which are ignored."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width, dtype=dtype), torch.randn(vocabulary, width, dtype=dtype)
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[[2, 7]] = -100
    return hidden, weight, torch.randn(vocabulary, dtype=dtype), targets


@pytest.mark.parametrize("dtype", PRECISION)
def test_losses_hits_and_scaled_gradients_written_over_the_logits(dtype):
    hidden, weight, bias, targets = problem()
    logits = (hidden @ weight.t() + bias).to(dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    scales = torch.linspace(-2, 2, len(targets), dtype=torch.float64)
    (expected * scales).sum().backward()
    targets[4] = logits[4].argmax()
    found, hits = logits.clone(), torch.ones(len(targets), dtype=torch.bool)
    losses = torch.full((len(targets),), 7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    token_losses(found, targets, losses, hits=hits)
    assert torch.equal(found, logits), "only read"
    assert hits[4]
    assert hits.sum() == (logits.argmax(1) == targets).sum()
    targets[4] = problem()[3][4]
    token_losses(found, targets, losses, scales=scales.to(losses.dtype), with_grad=True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), exact.grad, rtol=PRECISION[dtype], atol=PRECISION[dtype])
    assert losses[2] == losses[7] == 0
    assert not found[[2, 7]].any()


@pytest.mark.parametrize(("chunk", "with_bias"), thinned([1, 4, 11, 64], [True, False]))
def test_chunks_give_the_gradients_of_whole_logits(chunk, with_bias):
    made = problem()
    asked = [tensor.requires_grad_() for tensor in made[:3]]
    hidden, weight, bias = asked if with_bias else [*asked[:2], None]
    targets, needed = made[3], asked if with_bias else asked[:2]
    whole = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")
    expected = torch.autograd.grad(3 * whole, needed)
    chunked = chunked_cross_entropy(hidden, weight, bias, targets, chunk)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)
    for found, exact in zip(torch.autograd.grad(3 * chunked, needed), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("terms", [LossTerms(0.2), LossTerms(0, 0.1), LossTerms(0.2, 0.1)])
def test_chunks_smooth_labels_as_torch_does_and_add_the_z_loss(terms):
    hidden, weight, bias, targets = problem()
    needed = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(hidden, weight, bias)
    whole = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=terms.smoothing)
    whole = whole + terms.z_loss * (logits.exp().sum(1).log() ** 2)[targets != -100].sum()
    expected = torch.autograd.grad(3 * whole, needed)
    chunked = chunked_cross_entropy(hidden, weight, bias, targets, 4, terms)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)
    for found, exact in zip(torch.autograd.grad(3 * chunked, needed), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, 64])
def test_log_probabilities_pass_on_whatever_comes_from_behind(chunk):
    hidden, weight, bias, targets = problem()
    needed = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    factors = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    whole = -F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    expected = torch.autograd.grad((whole.exp() * factors).sum(), needed)
    chunked = chunked_log_probabilities(hidden, weight, bias, targets, chunk)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)
    found = torch.autograd.grad((chunked.exp() * factors).sum(), needed)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12)


def test_counts_are_those_of_whole_logits():
    hidden, weight, bias, targets = problem()
    logits = F.linear(hidden, weight, bias)
    targets[:2] = logits[:2].argmax(1)
    loss, correct = chunked_counts(hidden, weight, bias, targets, 4)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, targets, reduction="sum")), rel=1e-12)
    assert correct == (logits.argmax(1) == targets).sum() >= 2


def test_a_frozen_head_gets_no_gradient_and_what_it_reads_does():
    hidden, weight, bias, targets = problem()
    hidden.requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum"), hidden)
    chunked_cross_entropy(hidden, weight, bias, targets, 4).backward()
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-10, atol=1e-12)
    assert weight.grad is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has wheels for Linux alone")
def test_the_kernel_does_what_plain_torch_does():
    """By triton's interpreter, on the CPU, in a process of its own."""
    command = [sys.executable, "-m", "tests.build.interpreted_token_losses"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    for case, losses, gradients in map(json.loads, done.stdout.splitlines()):
        assert losses < 1e-5, case
        assert gradients < 2 * PRECISION[getattr(torch, case[0])], case  # the next number where rounding differs

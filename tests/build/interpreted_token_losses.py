"""Compares the kernel of token losses, which triton's interpreter runs on the CPU, with plain torch.

Prints a line of JSON a case: what it was, and the largest errors of losses and gradients. A process of its own
(`test_cross_entropy.py` starts it): TRITON_INTERPRET must be set before the kernel is defined.
"""

import itertools
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from framework.build.losses import cross_entropy_kernel
from framework.build.losses.cross_entropy import PLAIN, LossTerms, token_losses

cross_entropy_kernel.BLOCK = 64
TOKENS = 9


def compare(dtype: str, vocabulary: int, hits: bool, scaled: bool) -> tuple[float, float]:
    """Largest errors of losses and of gradients. Hits are compared too, and a target that is no token gives NaN."""
    logits = (torch.randn(TOKENS, vocabulary) * 5).to(getattr(torch, dtype))
    logits[4] = logits[4].round()  # several are the likeliest
    terms = LossTerms(0.1, 1e-2) if scaled else PLAIN
    logits[5, : min(vocabulary - 1, 100)] = -30.0 if scaled else -float("inf")  # a block without any finite logit
    targets = torch.randint(0, vocabulary, (TOKENS,))
    targets[2], targets[4], targets[5] = -100, logits[4].argmax(), vocabulary - 1
    scales = torch.randn(TOKENS) if scaled else None
    expected, found = logits.clone(), logits.clone()
    losses = [torch.full((TOKENS,), 7.0) for _ in range(2)]
    counted = [torch.ones(TOKENS, dtype=torch.bool) if hits else None for _ in range(2)]
    token_losses(expected, targets, losses[0], hits=counted[0], scales=scales, with_grad=True, terms=terms)
    cross_entropy_kernel.token_losses_on_gpu(found, targets, losses[1], counted[1], scales, True, *terms)
    assert counted[0] is None or torch.equal(counted[0], counted[1])
    read = logits.clone()
    cross_entropy_kernel.token_losses_on_gpu(read, targets, losses[1], None, None, False, *terms)
    assert torch.equal(read, logits)
    targets[3] = vocabulary
    strange = torch.empty(TOKENS)
    cross_entropy_kernel.token_losses_on_gpu(read, targets, strange, None, None, False, *terms)
    assert strange.isnan().nonzero().flatten().tolist() == [3]
    size = expected.abs().max()
    return float((losses[0] - losses[1]).abs().max()), float((expected.float() - found.float()).abs().max() / size)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in itertools.product(("float32", "bfloat16", "float16"), (63, 64, 200), (False, True), (False, True)):
        print(json.dumps([case, *compare(*case)]), flush=True)

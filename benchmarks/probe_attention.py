"""Measure what one attention call allocates in addition to its results, for each backend. Needs a CUDA card; prints
JSON.

python benchmarks/probe_attention.py > probe_attention.jsonl        (about 30 seconds)

Each line: the call, bytes kept by forward, and the peaks of forward and backward relative to the memory before. In
backward the results (three gradients) are part of the peak; `workspace` excludes them.
"""

import itertools
import json
import warnings

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"chosen": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
BACKENDS["efficient"] = SDPBackend.EFFICIENT_ATTENTION
SHAPES = [  # batch, heads, kv heads, tokens, head dim
    *((batch, 12, 12, 512, 64) for batch in (1, 2, 4, 6, 8, 12, 16, 32)),
    *((8, heads, heads, 512, 64) for heads in (4, 8, 16)),
    *((8, 12, 12, tokens, 64) for tokens in (128, 256, 384, 500, 1024)),
    (4, 12, 12, 2048, 64),
    (8, 12, 12, 512, 128),
    (4, 32, 8, 1024, 64),
    (2, 24, 8, 2048, 128),
    (1, 32, 8, 8192, 64),
    (2, 8, 4, 1024, 256),
]


def measure(call):
    """(result, bytes kept, peak over the start)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return result, stats["requested_bytes.all.current"] - before, stats["requested_bytes.all.peak"] - before


def probe(shape, backend, dropout, causal, masked, dtype):
    batch, heads, kv_heads, tokens, width = shape
    query, key, value = (
        torch.randn(batch, tokens, count, width, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    mask = torch.ones(batch, 1, tokens, tokens, device="cuda", dtype=torch.bool) if masked else None

    def forward():
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal and not masked, enable_gqa=heads != kv_heads
        )

    with sdpa_kernel(backend) if backend is not None else warnings.catch_warnings():
        output = forward()
        gradient = torch.randn_like(output)
        torch.autograd.grad(output, (query, key, value), gradient)
        del output
        output, kept, forward_peak = measure(forward)
        name = output.grad_fn.name()
        _grads, grads_kept, backward_peak = measure(
            lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)
        )
    return {
        "kernel": name,
        "forward_kept": kept,
        "forward_peak": forward_peak,
        "backward_peak": backward_peak,
        "workspace": backward_peak - grads_kept,
    }


def main():
    warnings.simplefilter("ignore")
    head = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    print(json.dumps(head), flush=True)
    options = itertools.product(SHAPES, BACKENDS, (0.0, 0.1), (False, True), (False, True))
    for shape, backend, dropout, causal, masked in options:
        if (masked and causal) or (shape[0] * shape[1] * shape[3] ** 2 > 2**31 and masked):
            continue
        line = dict(zip(("batch", "heads", "kv_heads", "tokens", "width"), shape, strict=True))
        line |= {"backend": backend, "dropout": dropout, "causal": causal, "masked": masked}
        try:
            line |= probe(shape, BACKENDS[backend], dropout, causal, masked, torch.bfloat16)
        except RuntimeError as error:
            line["error"] = str(error).splitlines()[0][:120]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

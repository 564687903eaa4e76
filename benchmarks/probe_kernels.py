"""Measure what single kernels allocate in addition to their results. Needs a CUDA card; prints JSON lines in a minute.

python benchmarks/probe_kernels.py > probe_kernels.jsonl

`requested` counts what the kernel asked for, `allocated` what the caching allocator gave.
"""

import json
import time

import torch
import torch.nn.functional as functional


def measure(call):
    """(bytes kept, peak of requested bytes over the start, peak of allocated bytes over the start)."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    before = (stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"])
    result = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    kept = stats["requested_bytes.all.current"] - before[0]
    del result
    return {
        "kept": kept,
        "requested": stats["requested_bytes.all.peak"] - before[0] - kept,
        "allocated": stats["allocated_bytes.all.peak"] - before[1] - kept,
    }


def report(name, call, **facts):
    try:
        print(json.dumps({"kernel": name, **facts, **measure(call)}), flush=True)
    except RuntimeError as error:
        print(json.dumps({"kernel": name, **facts, "error": str(error).splitlines()[0][:120]}), flush=True)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def probe_embedding():
    for tokens in (1024, 3072, 3073, 4096, 16384):
        for rows, width in ((128256, 2048), (30522, 768), (1000, 768)):
            indices = torch.randint(0, rows, (tokens,), device="cuda")
            gradient = normal(tokens, width)
            report(
                "embedding_dense_backward",
                lambda g=gradient, i=indices, r=rows: torch.ops.aten.embedding_dense_backward(g, i, r, -1, False),
                tokens=tokens, rows=rows, width=width,
            )  # fmt: skip


def probe_norms():
    for tokens in (4096, 8192, 65536, 131072):
        for dtype in (torch.bfloat16, torch.float32):
            rows, weight = normal(tokens, 768, dtype=dtype).requires_grad_(), normal(768, dtype=dtype).requires_grad_()
            out = functional.layer_norm(rows, (768,), weight, weight)
            gradient = torch.randn_like(out)
            report(
                "native_layer_norm_backward",
                lambda o=out, r=rows, w=weight, g=gradient: torch.autograd.grad(o, (r, w), g, retain_graph=True),
                tokens=tokens, dtype=str(dtype),
            )  # fmt: skip


def probe_sums():
    for tokens in (4096, 16384):
        for width in (768, 3072, 128256):
            rows = normal(tokens, width)
            report("sum_dim0", lambda r=rows: r.sum(0), tokens=tokens, width=width)
            report("logsumexp", lambda r=rows: torch.logsumexp(r.float(), 1), tokens=tokens, width=width)
            report("softmax_float", lambda r=rows: torch.log_softmax(r.float(), 1), tokens=tokens, width=width)


def probe_products():
    for tokens in (512, 4096):
        left, weight, bias = normal(tokens, 768), normal(3072, 768), normal(3072)
        report("linear", lambda a=left, w=weight: functional.linear(a, w), tokens=tokens)
        report("linear_bias", lambda a=left, w=weight, b=bias: functional.linear(a, w, b), tokens=tokens)
        offsets = torch.arange(tokens // 32, tokens + 1, tokens // 32, device="cuda", dtype=torch.int32)
        experts = normal(32, 768, 1536)
        report("grouped_mm", lambda a=left, e=experts, o=offsets: torch._grouped_mm(a, e, offs=o), tokens=tokens)


def probe_norm_of_many():
    tensors = [normal(8192, 2048) for _ in range(8)] + [normal(768) for _ in range(100)]
    report("foreach_norm", lambda: torch._foreach_norm(tensors, 2.0), tensors=len(tensors))
    indices = torch.randint(0, 32, (16384,), device="cuda")
    report("sort", lambda: torch.sort(indices), elements=16384)
    report("topk", lambda: torch.topk(normal(4096, 128, dtype=torch.float32), 8), rows=4096)


def main():
    start = time.perf_counter()
    print(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for probe in (probe_products, probe_embedding, probe_norms, probe_sums, probe_norm_of_many):
        probe()
        torch.cuda.empty_cache()
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()

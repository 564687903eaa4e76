"""Times of the chunked loss, and of steps that wait for their figures or do not, on one card.

python benchmarks/token_losses.py head OUT.json          the head's loss and gradients, by chunk and kernel settings
python benchmarks/token_losses.py step OUT.json [NAME]   whole steps, with the update before and after the figures
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = {"1B": (8192, 2048, 128_256), "0.6B": (8192, 1024, 151_936)}
"""Tokens, width and vocabulary."""
STEPS = 16


def milliseconds(call: Callable[[], Any], times: int = 12) -> float:
    """Median of `times` calls, by events."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return round(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)), 3)


def float32_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The earlier chunked loss: float32 logits, one operator after the other."""
    total, hidden_grad, weight_grad = torch.zeros((), device="cuda"), torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        rows, picked = hidden[part].bfloat16(), targets[part].unsqueeze(1)
        scores = (rows @ weight.bfloat16().t()).float()
        log_sum = scores.logsumexp(1)
        total += (log_sum - scores.gather(1, picked).squeeze(1)).sum()
        scores.sub_(log_sum.unsqueeze(1)).exp_()
        scores.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=scores.dtype))
        scores.mul_(1.0)
        grad = scores.bfloat16()
        del scores
        hidden_grad[part] = grad @ weight.bfloat16()
        if weight.dtype == grad.dtype:
            weight_grad.addmm_(grad.t(), rows)
        else:
            weight_grad += grad.t() @ rows
    return total


def _autocast_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> None:
    from framework.build.losses.chunked_loss import chunked_cross_entropy

    with torch.autocast("cuda", dtype=torch.bfloat16):
        chunked_cross_entropy(hidden, weight, None, targets, chunk)


def head() -> dict[str, Any]:
    """Milliseconds of loss and gradients, of the kernel by itself, and its error relative to float64."""
    from framework.build.losses import cross_entropy_kernel as kernel

    found: dict[str, Any] = {}
    for name, (tokens, width, vocabulary) in SHAPES.items():
        targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for dtype in (torch.bfloat16, torch.float32):
            weight = (torch.randn(vocabulary, width, device="cuda") / 40).to(dtype).requires_grad_()
            row = found[f"{name}/{dtype}"] = {}
            with torch.no_grad():
                row["float32 logits, 1024"] = milliseconds(partial(float32_chunks, hidden, weight, targets, 1024))
            for chunk in (512, 1024, 2048, 4096, 8192):
                row[f"one kernel, {chunk}"] = milliseconds(partial(_autocast_loss, hidden, weight, targets, chunk))
        logits = torch.randn(1024, vocabulary, device="cuda", dtype=torch.bfloat16)
        losses = torch.empty(1024, device="cuda")
        settings: dict[str, float] = {}
        for block in (2048, 4096, 8192, 16384, 32768):
            for warps in (4, 8, 16, 32):
                if 32 * warps * 4 <= block <= 32 * warps * 128:
                    kernel.BLOCK, kernel.WARPS = block, warps
                    arguments = (logits, targets[:1024], losses, None, None, True)
                    settings[f"{block}/{warps}"] = milliseconds(partial(kernel.token_losses_on_gpu, *arguments))
        found[f"{name}/kernel, 1024 tokens"] = settings
        kernel.BLOCK, kernel.WARPS = 8192, 8
        print(json.dumps({key: value for key, value in found.items() if key.startswith(name)}), flush=True)
    return found


def step(name: str) -> dict[str, Any]:
    """Milliseconds of a step: figures read before the update, as before, and one step late; batches from the host."""
    from benchmarks.plan_grid import configs
    from framework.build.data.packing import on_device
    from framework.build.place import real_place
    from framework.run import step as steps
    from framework.run.planning.measure import assembled_at_random, synthetic_batches

    config = configs("h200_141gb")[name]
    changes = {"compile": True, "compile_scope": "block"}
    config = config.model_copy(update={"training": config.training.model_copy(update=changes)})
    assembly = assembled_at_random(config, real_place(torch.device("cuda", 0)))
    on_host = [{key: value.cpu() for key, value in batch.items()} for batch in synthetic_batches(assembly)]
    found: dict[str, Any] = {"losses": {}}
    number = 0
    for kind in ("warm", "waits", "late", "waits again", "late again"):
        steps.waits_for_figures = lambda _, kind=kind: kind.startswith("waits")  # type: ignore[assignment]
        unread, seconds = None, []
        for _ in range(STEPS):
            number += 1
            if kind.startswith("waits"):
                batches = [{key: value.cuda() for key, value in batch.items()} for batch in on_host]
            else:
                batches = [on_device(assembly.place.device, batch) for batch in on_host]
            launched = steps.launch_step(assembly, batches, number)
            if unread is not None:
                unread.result()
                seconds.append(time.perf_counter())
            unread = launched
        found["losses"][kind] = unread.result().loss if unread is not None else 0
        steady = seconds[3:]
        found[kind] = round(1000 * (steady[-1] - steady[0]) / (len(steady) - 1), 3)
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    found["kernels"] = _profile(assembly, steps, on_host, number)
    return found


def _profile(assembly: Any, steps: Any, on_host: Any, number: int) -> dict[str, float]:
    """Milliseconds per step by kernel, the 25 longest, and the time in which none of them ran."""
    from torch.profiler import ProfilerActivity, profile

    batches = [{key: value.cuda() for key, value in batch.items()} for batch in on_host]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for extra in range(1, 4):
            steps.launch_step(assembly, batches, number + extra)
        torch.cuda.synchronize()
    rows = sorted(run.key_averages(), key=lambda item: -item.self_device_time_total)
    return {item.key[:90]: round(item.self_device_time_total / 3000, 3) for item in rows[:40]}


def main() -> None:
    """Run one part and write its results."""
    made = head() if sys.argv[1] == "head" else step(*sys.argv[3:4])
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    Path(sys.argv[2]).write_text(json.dumps({**about, **made}, indent=1) + "\n")
    print(json.dumps(made)[:3000])


if __name__ == "__main__":
    main()

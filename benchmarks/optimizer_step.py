"""Time of gradient clipping and update for the weights of Llama-3.2-1B, by optimizer, and the share of the card's
bandwidth.

python benchmarks/optimizer_step.py OUT.json        (on a card; a minute)

Every case: random bfloat16 gradients, weights with a standard deviation of 0.02, median of 20 updates by CUDA events,
including norm and clipping. `bytes` is the traffic that each update needs at least: gradients for the norm, then
weights, gradients and states. A copy in the same call is the ceiling. Each of our kernels is first compared with plain
torch on the same numbers.
"""

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from framework.build.optimizers.any_precision import AnyPrecisionAdamW, Kernel
from framework.build.optimizers.clipping import clip_gradients, gradient_norms
from framework.installation import shipped
from framework.schema.choices import Rounding

ONE_B = yaml.safe_load((shipped("conf") / "model" / "llama3.2_1b.yaml").read_text())["model"]["architecture"]
LIMIT, RATE, BETAS, EPSILON = 1.0, 1e-5, (0.9, 0.999), 1e-8


def weights(architecture: dict[str, Any], device: str) -> list[nn.Parameter]:
    """Random weights of every shape in the model, each with a gradient."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for like in model.parameters():
        drawn = torch.randn(like.shape, generator=generator, device=device, dtype=torch.bfloat16)
        parameter = nn.Parameter(drawn * 0.02)
        parameter.grad = torch.randn(like.shape, generator=generator, device=device, dtype=torch.bfloat16) * 1e-3
        made.append(parameter)
    return made


def ours(parameters: Sequence[nn.Parameter], rounding: Rounding, bits: int, kernel: Kernel | None) -> AnyPrecisionAdamW:
    """Our optimizer; without a kernel in plain torch."""
    numbers: dict[torch.Tensor, int] = {parameter: number for number, parameter in enumerate(parameters)}
    return AnyPrecisionAdamW(
        list(parameters),
        RATE,
        BETAS,
        EPSILON,
        rounding=rounding,
        state_bits=bits,
        seed=1,
        numbers=numbers,
        kernel=kernel,
    )


def cases(kernel: Kernel) -> Iterator[tuple[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]]]:
    """Name and maker of each optimizer."""
    yield "adamw_torch_fused", lambda parameters: torch.optim.AdamW(parameters, lr=RATE, fused=True)
    yield "adamw_torch", lambda parameters: torch.optim.AdamW(parameters, lr=RATE, foreach=True)
    for rounding, bits in ((Rounding.STOCHASTIC, 16), (Rounding.KAHAN, 16), (Rounding.STOCHASTIC, 8)):
        yield f"{rounding} {bits} bits", lambda parameters, r=rounding, b=bits: ours(parameters, r, b, kernel)


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds by CUDA events, after three uncounted runs."""
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def update(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """The part of a step after backward."""
    clip_gradients(optimizer, parameters, LIMIT, gradient_norms(parameters)[0])
    optimizer.step()


def timed(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """One row of the table."""
    whole = median_ms(lambda: update(optimizer, parameters))
    alone = median_ms(optimizer.step)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    held = sum(state.nbytes for state in states)
    size = sum(parameter.nbytes for parameter in parameters)
    moved = 3 * size + 2 * held
    return {"case": name, "update_ms": alone, "with_norm_and_clip_ms": whole, "update_bytes": moved, "norm_bytes": size}


def difference(rounding: Rounding, bits: int, kernel: Kernel) -> dict[str, float]:
    """Difference of two steps by the kernel from two in plain torch: the share of elements that differ, and the largest
    difference relative to the largest element.
    """
    architecture = {**ONE_B, "num_hidden_layers": 1, "vocab_size": 4099}
    sides = [weights(architecture, "cuda") for _ in range(2)]
    found = {"share": 0.0, "largest": 0.0}
    for parameters, own in zip(sides, (kernel, None), strict=True):
        optimizer = ours(parameters, rounding, bits, own)
        for _ in range(2):
            update(optimizer, parameters)
    for one, other in zip(*sides, strict=True):
        found["share"] = max(found["share"], float((one != other).float().mean()))
        largest = (one.float() - other.float()).abs().max() / other.float().abs().max()
        found["largest"] = max(found["largest"], float(largest))
    return found


def main() -> None:
    from framework.build.optimizers.any_precision_kernel import launch

    kernel, rows = Kernel(launch), []
    copied = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    ceiling = 2 * copied.nbytes / median_ms(copied.clone) / 1e9
    document: dict[str, Any] = {
        "question": "time of norm, clip and update over the weights of Llama-3.2-1B in bfloat16",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "packages": {"torch": torch.__version__, "python": platform.python_version()},
        "copy_tb_s": round(ceiling, 3),
        "differences": {
            f"{rounding} {bits} bits": difference(rounding, bits, kernel) for rounding in Rounding for bits in (16, 8)
        },
        "rows": rows,
    }
    del copied
    for name, make in cases(kernel):
        parameters = weights(ONE_B, "cuda")
        row = timed(name, make(parameters), parameters)
        row["tb_s"] = round(row["update_bytes"] / row["update_ms"] / 1e9, 3)
        row["share_of_copy"] = round(row["tb_s"] / ceiling, 3)
        rows.append(row)
        print(row, flush=True)
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""`doctor --calibrate`: measure this machine and write the result as a preset for `gpu=FILE`.

Without a card only the host is measured; the result is then a section to add to a recipe that plans for another card.
"""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from framework.activity import now
from framework.errors import Problem, RequestError
from framework.memory.cards import CALIBRATED_BY, MIB, InstalledCard, capability_of, installed_cards
from framework.memory.requirements import is_installed
from framework.memory.roofline import CALIBRATED, occupancy
from framework.run.planning.host_probe import probe_host, shares_of
from framework.run.planning.measurements import Measurements
from framework.schema.config import TrainingConfig
from framework.schema.gpu import HostParams
from framework.schema.optimizers import Optimizer

PRODUCT = 8192
"""Rows and columns of the multiplied matrices: large enough to fill every multiprocessor of today's cards."""
PRODUCTS = (512, 1024, 2048, 4096, PRODUCT)
"""Sizes of the product curve; the smallest is dominated by the kernel's start and end."""
COPY_BYTES = 1 << 30
STEADY = 1.1
"""Ratio of a host's slowest to fastest second up to which its speed counts as steady."""
TORCH_ONLY = "torch"
WARM_UPS, REPEATS = 3, 10

REACHED: Mapping[str, float] = {
    "bandwidth_bytes_per_second": 3.01e12 / 3.35e12,
    "host_link_bytes_per_second": 5.5e10 / 6.3e10,
    "fp32_flops": 0.8,
    "tf32_flops": 0.8,
    "bf16_flops": 7.9e14 / 9.894e14,
    "fp16_flops": 7.9e14 / 9.894e14,
    "fp8_flops": 1.5e15 / 1.9789e15,
}
"""Share of the data-sheet rate that each measurement reaches on an H100 (conf/gpu/h100_80gb.yaml: H100 80GB HBM3,
driver 580, torch 2.11, 2026-11; fp16 as bf16, fp32 and tf32 assumed). Fields of `gpu` are data-sheet rates, of which
the roofline model takes shares, so a measured rate is divided by this."""

STEP: Mapping[str, Any] = {
    "training": {"per_device_train_batch_size": 4, "max_steps": 10},
    "model": {
        "load_pretrained_weights": False,
        "model_max_length": 1024,
        "architecture": {
            "model_type": "llama",
            "vocab_size": 8192,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    },
}
"""A step that runs the same kernels as a real model, in 3 GiB. The driver loads a kernel when it first runs."""


@dataclass(frozen=True)
class Calibration:
    """Measurements of one card. Rates are unscaled: bytes read and written, and operations, per second."""

    device_name: str
    driver: str
    torch_version: str
    date: str
    capability: str
    multiprocessors: int
    total_bytes: int
    others_bytes: int
    """Bytes used by other processes, such as a display, before this one used the card."""
    context_bytes: int
    bare_context_bytes: int
    """Bytes of the context before any kernel was loaded."""
    library_context_bytes: Mapping[str, int]
    """Installed library -> bytes of the context after a step with its kernels."""
    allocator: str
    """Backend and settings of the allocator during the measurement."""
    cublas_workspace_bytes: int
    l2_cache_bytes: int
    rates: Mapping[str, float]
    """Field of `gpu` -> measured rate, except for those that the card does not support."""
    product_curve: Mapping[int, float]
    """Rows and columns (PRODUCTS) -> seconds of such a product in the dtype of training."""
    host: HostParams
    host_variation: float = 1.0
    """Ratio of the host's slowest to fastest second."""

    @property
    def where(self) -> str:
        """Card, versions and date, as a source note."""
        return f"{self.device_name}, driver {self.driver}, torch {self.torch_version}, {self.date}"


def has_card() -> bool:
    """Whether there is a CUDA card to measure."""
    return bool(installed_cards()) and torch.cuda.is_available()


def calibrate_host() -> dict[str, Any]:
    """The `gpu` section of a machine without a card: the speed of its host, measured in under a minute."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    where, speed = f"{CALIBRATED_BY} {_processor()}, torch {torch.__version__}, {date}", probe_host()
    return {"host": _rounded(shares_of(speed)), "sources": {"host": where + _varied(speed.variation)}}


def _varied(variation: float) -> str:
    """Note about a host whose speed varied during the measurement."""
    return f"; the host's slowest second took {variation:.2f} times its fastest" if variation > STEADY else ""


def _processor() -> str:
    """Name of the processor if known, and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return f"{named or platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


def _rounded(host: HostParams) -> dict[str, float]:
    return {kind: round(share, 3) for kind, share in host.model_dump().items()}


def calibrate(measured: Measurements) -> Calibration:
    """Measure host and first visible CUDA card, in less than a minute. Raises RequestError without a card."""
    if not has_card():
        raise RequestError([Problem("--calibrate", "this machine has no CUDA card to measure")])
    card = installed_cards()[0]
    driver, others = _driver_and_use(card)
    now("measuring the context of the card")
    contexts = _contexts(card, others, measured)  # before torch's compiler creates a context in this process
    # Memory that this process takes on the card before its first kernel, apart from a fill
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    bare = total - free - torch.cuda.memory_reserved() - others
    workspace = _workspace_bytes()  # the first product of this process
    speed = probe_host()
    now("measuring the card")
    return Calibration(
        device_name=torch.cuda.get_device_name(),
        driver=driver,
        torch_version=torch.__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        capability=card.capability,
        others_bytes=others,
        bare_context_bytes=bare,
        context_bytes=contexts[TORCH_ONLY],
        library_context_bytes={name: size for name, size in contexts.items() if name != TORCH_ONLY},
        allocator=f"{torch.cuda.get_allocator_backend()}, {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or 'no settings'}",
        cublas_workspace_bytes=workspace,
        l2_cache_bytes=torch.cuda.get_device_properties(0).L2_cache_size,
        total_bytes=torch.cuda.mem_get_info()[1],
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        rates={**_copy_rates(), **dict(_product_rates(capability_of(card.capability)))},
        product_curve=_product_curve(capability_of(card.capability)),
        host=shares_of(speed),
        host_variation=speed.variation,
    )


def _contexts(card: InstalledCard, others: int, measured: Measurements) -> dict[str, int]:
    """Bytes of a context with the kernels of a step, and with those of each installed library added."""
    precision = "bf16" if capability_of(card.capability) >= (8, 0) else "none"
    facts = {"name": card.name or "calibrated", "capability": card.capability}
    plain = TrainingConfig.model_validate(
        {**STEP, "training": {**STEP["training"], "mixed_precision_dtype": precision}, "gpu": facts}
    )
    settings = list[str]()
    training, model = plain.training, plain.model
    if is_installed("bitsandbytes"):
        training = training.model_copy(update={"optimizer": Optimizer.ADAMW_8BIT})
        settings.append("bitsandbytes")
    if is_installed("liger-kernel") and is_installed("triton"):
        model = model.model_copy(update={"enable_liger_kernel": True})
        settings.append("liger-kernel")
    steps = {TORCH_ONLY: plain}
    if settings:
        steps[" and ".join(settings)] = plain.model_copy(update={"training": training, "model": model})
    contexts = {}
    for name, config in steps.items():
        step = measured(config)
        contexts[name] = step.device_bytes - step.reserved_bytes - others
    return contexts


def _driver_and_use(card: InstalledCard) -> tuple[str, int]:
    """Version of the driver, and bytes in use now."""
    command = ["nvidia-smi", f"--id={card.uuid}", "--query-gpu=driver_version,memory.used"]
    done = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    driver, used = done.stdout.strip().split(", ")
    return driver, int(used) * MIB


def _workspace_bytes() -> int:
    """Bytes that the first matrix product of a process allocates in addition to its result."""
    left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
    before = torch.cuda.memory_allocated()
    product = left @ right
    return torch.cuda.memory_allocated() - before - product.nbytes


def _copy_rates() -> dict[str, float]:
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return {
        "bandwidth_bytes_per_second": 2 * size / _seconds(lambda: target.copy_(source)),
        "host_link_bytes_per_second": size / _seconds(lambda: target.copy_(pinned, non_blocking=True)),
    }


def _product_rates(capability: tuple[int, int]) -> Iterator[tuple[str, float]]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        yield "fp32_flops", _product_rate(torch.float32)
        if capability >= (8, 0):
            matmul.fp32_precision = "tf32"
            yield "tf32_flops", _product_rate(torch.float32)
            yield "bf16_flops", _product_rate(torch.bfloat16)
    finally:
        matmul.fp32_precision = before
    if capability >= (7, 0):
        yield "fp16_flops", _product_rate(torch.float16)
    if capability >= (8, 9):
        yield "fp8_flops", _fp8_product_rate()


def _product_rate(dtype: torch.dtype) -> float:
    left, right = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * PRODUCT**3 / _seconds(lambda: left @ right)


def _product_curve(capability: tuple[int, int]) -> dict[int, float]:
    """Seconds of a product by size, queued behind a long one so that the card never waits for the host."""
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float32
    long = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=dtype)
    curve = {}
    for size in PRODUCTS:
        left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        curve[size] = _queued_seconds(partial(torch.matmul, long, long), partial(torch.matmul, left, right))
    return curve


def _queued_seconds(first: Callable[[], object], call: Callable[[], object]) -> float:
    """Mean seconds of `call` on the card, queued while the card still runs `first`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(WARM_UPS):
        first()
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPEATS


def product_start(curve: Mapping[int, float], multiprocessors: int) -> float:
    """Fixed seconds of a product beyond arithmetic and launch: the smallest product's time less its arithmetic at the
    rate of the largest."""
    small, large = min(curve), max(curve)
    busy = {size: 2 * size**3 / occupancy((1, size, size, size), multiprocessors) for size in (small, large)}
    return max(0.0, curve[small] - curve[large] * busy[small] / busy[large] - CALIBRATED.launch_seconds)


def _fp8_product_rate() -> float:
    left, right = (torch.randn(PRODUCT, PRODUCT, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")
    return (
        2
        * PRODUCT**3
        / _seconds(lambda: torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16))
    )


def _seconds(call: Callable[[], object]) -> float:
    """Mean time of a call on the device, warm."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):  # each takes milliseconds, so that launch and wait are negligible
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS


def to_card(found: Calibration) -> dict[str, Any]:
    """The `gpu` section from the measurements, each with its source."""
    measured = f"{CALIBRATED_BY} {found.where}"
    others = f"; {found.others_bytes / MIB:,.0f} MiB were in use by others" if found.others_bytes else ""
    facts = {
        "name": re.sub(r"[^a-z0-9]+", "_", found.device_name.lower()).strip("_"),
        "capacity_bytes": found.total_bytes,
        "usable_bytes": found.total_bytes - found.others_bytes,
        "capability": found.capability,
        "multiprocessors": found.multiprocessors,
        "context_bytes": max(found.context_bytes, *found.library_context_bytes.values(), 0),
        "cublas_workspace_bytes": found.cublas_workspace_bytes,
        "l2_cache_bytes": found.l2_cache_bytes,
        "product_seconds": product_start(found.product_curve, found.multiprocessors),
        "host": _rounded(found.host),
    }
    rates = {field: rate / REACHED[field] for field, rate in found.rates.items()}
    # MiB before any kernel, with those of a step, with those of libraries.
    sizes = [(found.bare_context_bytes, "before a step"), (found.context_bytes, "with the kernels of a step")]
    sizes += [(size, f"with those of {name}") for name, size in found.library_context_bytes.items()]
    contexts = ", ".join(f"{size / MIB:,.0f} MiB {when}" for size, when in sizes)
    sources = {
        "usable_bytes": measured + others,
        "context_bytes": f"{measured}: {contexts}; allocator {found.allocator}",
        "product_seconds": f"{measured}: {_format_curve(found.product_curve)}",
        "host": measured + _varied(found.host_variation),
        **{
            field: f"{measured}: {rate:.3g}, divided by {REACHED[field]:.3f}, the share of its data sheet that an H100 "
            "reaches in the same test"
            for field, rate in found.rates.items()
        },
        "others": measured,
    }
    return {**facts, **rates, "sources": sources}


def _format_curve(curve: Mapping[int, float]) -> str:
    rates = (f"{2 * size**3 / seconds / 1e12:.0f} at {size:,}" for size, seconds in curve.items())
    return f"square products reach {', '.join(rates)} TFLOP/s"


def to_yaml(found: Calibration) -> str:
    """The card as a preset file."""
    return section(to_card(found), f"Measured by `tunesmith doctor --calibrate` on {found.where}.")


def section(card: Mapping[str, Any], title: str) -> str:
    """A `gpu` section as YAML, with `title` as a comment."""
    lines = [f"# {title}", "gpu:"]
    for field, value in card.items():
        if isinstance(value, Mapping):
            lines += [f"  {field}:", *(f"    {name}: {json.dumps(inner)}" for name, inner in value.items())]
        else:
            scalar = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            lines.append(f"  {field}: {scalar}")
    return "\n".join(lines) + "\n"

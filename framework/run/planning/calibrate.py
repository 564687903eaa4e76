"""`doctor --calibrate`: measure the card of this machine and write its facts as a preset that `gpu=FILE` takes."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from framework.errors import Problem, RequestError
from framework.memory.cards import MIB, capability_of
from framework.memory.installed import InstalledCard, installed_cards
from framework.run.planning.measure import measure_in_subprocess
from framework.schema.config import TrainingConfig

PRODUCT = 8192
"""Rows and columns of the matrices that are multiplied: large enough to fill every multiprocessor of today's cards."""
COPY_BYTES = 1 << 30
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
"""Share of the data sheet's rate that each measurement reaches on an H100 (conf/gpu/h100_80gb.yaml: H100 80GB HBM3,
driver 580, torch 2.11, 2026-11; fp16 as bf16, fp32 and tf32 assumed). A field of `gpu` is a data sheet rate, and the
roofline takes its shares of that, so a measured rate is divided by this."""

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
"""A step that loads the kernels that a real model's does, in 3 GiB. The driver loads a kernel when it first runs."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on one card. Rates are as measured: bytes, read and written, and operations per second."""

    device_name: str
    driver: str
    torch_version: str
    date: str
    capability: str
    multiprocessors: int
    total_bytes: int
    others_bytes: int
    """Taken by others, a display among them, before this process used the card."""
    context_bytes: int
    cublas_workspace_bytes: int
    rates: Mapping[str, float]
    """Field of `gpu` -> what was measured for it; without those that the card cannot do."""

    @property
    def where(self) -> str:
        """Card, versions and date, as a source names them."""
        return f"{self.device_name}, driver {self.driver}, torch {self.torch_version}, {self.date}"


def calibrate() -> Calibration:
    """Measure the first visible CUDA card, in under two minutes. Raises RequestError where there is none."""
    cards = installed_cards()
    if not cards or not torch.cuda.is_available():
        raise RequestError([Problem("--calibrate", "this machine has no CUDA card to measure")])
    card = cards[0]
    driver, others = _driver_and_use(card)
    step = measure_in_subprocess(_step_config(card))  # before this process has a context of its own on the card
    return Calibration(
        device_name=step.device_name,
        driver=driver,
        torch_version=torch.__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        capability=card.capability,
        others_bytes=others,
        context_bytes=step.device_bytes - step.reserved_bytes - others,
        cublas_workspace_bytes=_workspace_bytes(),  # the first product of this process
        total_bytes=torch.cuda.mem_get_info()[1],
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        rates=_rates(capability_of(card.capability)),
    )


def _driver_and_use(card: InstalledCard) -> tuple[str, int]:
    """Version of the driver, and bytes that are in use now."""
    command = ["nvidia-smi", f"--id={card.uuid}", "--query-gpu=driver_version,memory.used"]
    done = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    driver, used = done.stdout.strip().split(", ")
    return driver, int(used) * MIB


def _step_config(card: InstalledCard) -> TrainingConfig:
    precision = "bf16" if capability_of(card.capability) >= (8, 0) else "none"
    facts = {"name": card.name or "calibrated", "capability": card.capability}
    return TrainingConfig.model_validate(
        {**STEP, "training": {**STEP["training"], "mixed_precision_dtype": precision}, "gpu": facts}
    )


def _workspace_bytes() -> int:
    """What the first matrix product of a process adds to the allocator beside its result."""
    left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
    before = torch.cuda.memory_allocated()
    product = left @ right
    return torch.cuda.memory_allocated() - before - product.nbytes


def _rates(capability: tuple[int, int]) -> dict[str, float]:
    return {**_copy_rates(), **dict(_product_rates(capability))}


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
    for _ in range(REPEATS):  # each takes milliseconds, beside which the launch and the wait are nothing
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS


def to_card(found: Calibration) -> dict[str, Any]:
    """The `gpu` section that the measurements give, each with its source."""
    measured = f"measured on {found.where}"
    others = f"; {found.others_bytes / MIB:,.0f} MiB were in use by others" if found.others_bytes else ""
    facts = {
        "name": re.sub(r"[^a-z0-9]+", "_", found.device_name.lower()).strip("_"),
        "capacity_bytes": found.total_bytes,
        "usable_bytes": found.total_bytes - found.others_bytes,
        "capability": found.capability,
        "multiprocessors": found.multiprocessors,
        "context_bytes": found.context_bytes,
        "cublas_workspace_bytes": found.cublas_workspace_bytes,
    }
    rates = {field: rate / REACHED[field] for field, rate in found.rates.items()}
    sources = {
        "usable_bytes": measured + others,
        "context_bytes": f"{measured}, with the kernels of a training step",
        **{
            field: f"{measured}: {rate:.3g}, divided by {REACHED[field]:.3f}, the share of its data sheet that an H100 "
            "reaches in the same test"
            for field, rate in found.rates.items()
        },
        "others": measured,
    }
    return {**facts, **rates, "sources": sources}


def to_yaml(found: Calibration) -> str:
    """The card as a preset file."""
    lines = [f"# Measured by `tunesmith doctor --calibrate` on {found.where}.", "gpu:"]
    for field, value in to_card(found).items():
        if field == "sources":
            lines += ["  sources:", *(f"    {name}: {json.dumps(source)}" for name, source in value.items())]
        else:
            lines.append(f"  {field}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)

"""Facts about the machine at hand."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "comet_ml",
    "datasets",
    "flash-attn",
    "gguf",
    "hydra-core",
    "liger-kernel",
    "mlflow",
    "omegaconf",
    "peft",
    "pydantic",
    "safetensors",
    "swanlab",
    "tensorboard",
    "torch",
    "torchao",
    "trackio",
    "transformers",
    "triton",
    "wandb",
)
"""Those that a recipe can need."""


def describe() -> dict[str, Any]:
    """Python, processors, torch, CUDA, cards and package versions (None: not installed). Loads torch."""
    import torch

    from framework.memory.installed import detect

    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cards": [f"{card.name}, {card.total_memory} bytes, capability {card.major}.{card.minor}" for card in cards],
        "preset": detect() or "cpu",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

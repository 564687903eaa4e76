"""Every generator that a step may draw from: torch's on the CPU and on the card, Python's and numpy's."""

import json
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Start all of them from a seed: as transformers' `set_seed`, which imports peft."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # of every device


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Their states as tensors and as plain numbers. Waits for no device."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    numpy_state = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)]
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def dumped() -> str:
    """The same as one text."""
    tensors, numbers = random_state()
    return json.dumps({"tensors": {name: tensor.tolist() for name, tensor in tensors.items()}, "numbers": numbers})


def parsed(text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `dumped` has written."""
    document = json.loads(text)
    tensors = {name: torch.tensor(values, dtype=torch.uint8) for name, values in document["tensors"].items()}
    return tensors, document["numbers"]


def restore_random_state(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Go on from states that `random_state` gave, also after a detour through safetensors and JSON."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = numbers["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))

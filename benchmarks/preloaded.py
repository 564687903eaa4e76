"""Imports of the server that `rows.py` forks from. Raises RuntimeError if they have started CUDA."""

import importlib
import sys

import torch
import torch.utils._triton

FAMILIES = ("bert", "gemma2", "gpt2", "llama", "modernbert", "qwen3", "qwen3_moe")
MODULES = ("framework.run.planning.measure", "framework.run.rehearsal.rehearse")


def preload() -> None:
    """Import everything that most rows need.

    transformers imports torchao if it is installed, which checks for Triton: to answer, torch would start CUDA.
    """
    asked = torch.utils._triton.has_triton
    if torch.cuda.is_available():  # which the driver's library tells here, without CUDA
        torch.utils._triton.has_triton = lambda: True
    for name in (*(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES), *MODULES):
        importlib.import_module(name)
    torch.utils._triton.has_triton = asked
    if torch.cuda.is_initialized() or "bitsandbytes" in sys.modules:
        raise RuntimeError("CUDA has started, or bitsandbytes may have: forked processes could not use it")


preload()

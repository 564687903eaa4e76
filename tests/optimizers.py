"""The optimizers, each with what its test runs need, and bytes of state counted from the built objects."""

import importlib.util

import pytest
import torch

from framework.build.optimizers.low_bit import LOW_BIT
from framework.run.rehearsal.footprint import state_tensors
from framework.schema.optimizers import FACTS, Optimizer
from tests.tiny import LLAMA

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
"""Wide enough that some weights have 4096 elements or more, from where states are codes."""
BF16 = {"torch_dtype_str": "bfloat16"}
LOW_RANK = {"projection_rank": 16, "projection_update_steps": 2}


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (an optional extra)")


def is_paged(choice):
    return choice in LOW_BIT and LOW_BIT[choice].paged


def _marks(choice):
    return [needs(FACTS[choice].package)] if FACTS[choice].package else []


ON_CPU = [pytest.param(str(choice), marks=_marks(choice)) for choice in Optimizer if not is_paged(choice)]
"""Every optimizer that runs without a card."""
UNLIKE = ("adamw_torch", "adamw_8bit", "adafactor", "muon", "schedule_free_adamw", "galore_adamw", "anyprecision_adamw")
"""One of each kind of state in the quick suite."""


def training(optimizer, **more):
    """`training` of a small run with this optimizer."""
    rate = {"sgd": 1.0, "muon": 1e-2}.get(optimizer, 3e-3)
    projected = LOW_RANK if optimizer in ("galore_adamw", "apollo_adamw") else {}
    return {"optimizer": optimizer, "learning_rate": rate, "lr_scheduler_type": "constant", **projected, **more}


@pytest.fixture
def eager():
    """torchao compiles its update, which takes a minute on a CPU: here it runs as it is written."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def state_bytes(assembly):
    """Bytes of all states; step counts and other scalars are left out."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(assembly) if tensor.dim())

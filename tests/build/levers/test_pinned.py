"""CUDA's words for host memory that it cannot pin are those of a fault of the card."""

from typing import Any

import pytest
import torch

from framework.build.levers.offload import pinning
from framework.build.optimizers.parameter_wise import StateStore
from framework.build.parallel import fsdp
from framework.build.parallel.parallelize import Root
from framework.build.place import Place
from framework.build.ranks import Ranks
from framework.memory.explain import explain
from framework.run.oom.report import is_memory_failure
from framework.schema.fsdp import FSDPParams
from tests.tiny import LLAMA, tiny_assembly, tiny_config

GIB = 1 << 30


class Host:
    """A tensor that cannot be pinned."""

    def pin_memory(self) -> None:
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported")


def test_what_cannot_be_pinned_is_named() -> None:
    message = r"^could not pin 12.00 GiB of host memory \(CUDA error: invalid argument\)$"
    with pytest.raises(RuntimeError, match=message) as raised, pinning(12 * GIB):
        Host().pin_memory()
    assert is_memory_failure(raised.value), "so that it is explained, and a smaller micro-batch tried"
    explained = explain(f"RuntimeError: {raised.value}")
    assert (explained.cause, explained.message.request_bytes) == ("host", 12 * GIB)


def test_other_errors_pass() -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (RuntimeError("size mismatch"), torch.OutOfMemoryError("CUDA out of memory.")):
        with pytest.raises(type(error), match=str(error)), pinning(GIB):
            fail(error)


def pin_memory_fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("CUDA error: out of memory")


def test_states_on_the_host_are_pinned_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", pin_memory_fails)
    store = StateStore(Place(torch.device("cuda"), "cuda"), None)
    with pytest.raises(RuntimeError, match=r"could not pin 0\.50 GiB"):
        store.hold(torch.zeros((), dtype=torch.float32).expand(GIB // 8), "state")


def test_parts_on_the_host_are_pinned_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a rank pins is named, not the unit at which it ended."""
    made = tiny_assembly(tiny_config(LLAMA))
    config = made.config.model_copy(update={"fsdp": FSDPParams(enable_fsdp=True, cpu_offload=True)})
    monkeypatch.setattr(fsdp, "fully_shard", pin_memory_fails)
    monkeypatch.setattr(fsdp, "_mesh", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "element_size", lambda tensor: 4 << 20)
    weights = sum(parameter.numel() for parameter in made.model.parameters())
    message = f"could not pin {weights * (4 << 20) / 2 / 2**30:.2f} GiB"
    with pytest.raises(RuntimeError, match=message):
        fsdp.shard(config, Root(made.model), made.model, made.place, Ranks(world=2, local_world=2))

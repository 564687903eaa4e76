"""The card of this machine for one test at a time, and what a step takes on it."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from framework.run.planning.measurements import Measured, measure_in_subprocess
from framework.schema.config import TrainingConfig


@contextmanager
def own_card() -> Iterator[None]:
    """No other test that asks for it uses the card; what this process has left there, and what this test allocates, is
    given back."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    with (Path(tempfile.gettempdir()) / f"tunesmith-cards-{cards}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.last_exc = sys.last_value = sys.last_traceback = None  # with which pytest keeps what a failed test held
        _give_back()
        yield
        _give_back()


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def capped_card(room: float) -> Iterator[float]:
    """The card with `room` bytes more than this process holds now. The value is that limit in bytes."""
    with own_card():  # others measure what is in use on it
        limit = room + torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            yield limit
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def measure_apart(config: TrainingConfig) -> Measured:
    """The step in a process of its own, without the device bytes that others (this process too) held before it."""
    with own_card():
        free, total = torch.cuda.mem_get_info()
        found = measure_in_subprocess(config)
    return replace(found, device_bytes=found.device_bytes - (total - free))

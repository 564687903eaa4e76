"""Processes that tests watch from outside."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil


def is_working(number: int) -> bool:
    """Whether the process has not ended yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's first true value, within 20 seconds."""
    end = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found

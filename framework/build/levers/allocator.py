"""`training.allocator`: settings of torch's CUDA allocator, applied before the process uses the card.

Private names of torch used here: `torch._C._accelerator_setAllocatorSettings` and `_accelerator_getAllocatorSettings`
(torch 2.11 to 2.13), and the `allocator_settings` of `torch.cuda.memory._snapshot()`, which are those in effect.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from framework.build.place import Place
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.training import AllocatorParams

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with torch's settings, the one with precedence first."""
_MIB = 1 << 20
_UNLIMITED = (0, (1 << 63) - 1, -1)
"""The snapshot's values of an unset `max_split_size`, as a signed number."""


def asked_settings(params: AllocatorParams) -> dict[str, str]:
    """The requested settings, in torch's spelling."""
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in params if value is not None
    }


def choose_allocator(config: TrainingConfig) -> None:
    """Apply the allocator's settings, keeping other settings of the environment.

    Raises RequestError if the environment contradicts them, or if memory is already reserved under other settings.
    """
    asked = asked_settings(config.training.allocator)
    if not asked or config.gpu.name == "cpu":
        return
    _refuse_contradiction(asked)
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0:  # type: ignore[no-untyped-call]
        live = live_settings()
        problems = [
            Problem(
                f"training.allocator.{name}",
                f"is {value}, but CUDA has started in this process and holds memory under {live[name]}",
                expected="a separate process, as with `tunesmith train`",
            )
            for name, value in asked.items()
            if live[name] != value
        ]
        if problems:
            raise RequestError(problems)
    given = environment_text()[1]
    settings = ",".join(f"{name}:{value}" for name, value in asked.items())
    torch._C._accelerator_setAllocatorSettings(f"{given},{settings}" if given else settings)
    if "garbage_collection_threshold" in asked and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)  # torch collects only if a fraction is set


def environment_text() -> tuple[str, str]:
    """(variable, its value) that torch uses; two empty texts if neither is set."""
    return next(((name, text) for name in VARIABLES if (text := os.environ.get(name, "").strip())), ("", ""))


def environment_settings() -> Mapping[str, str]:
    """Settings in the environment, except the one with a list value."""
    return dict(re.findall(r"(\w+)\s*:\s*([^,\[\]\s]+)", environment_text()[1]))


def _refuse_contradiction(asked: Mapping[str, str]) -> None:
    variable, found = environment_text()[0], environment_settings()
    problems = [
        Problem(
            f"training.allocator.{name}",
            f"is {value}, and {variable} of the environment says {name}:{found[name]}",
            expected="the same in both, or one of them",
        )
        for name, value in asked.items()
        if name in found and found[name].lower() != value.lower()
    ]
    if problems:
        raise RequestError(problems)


def live_settings() -> dict[str, str]:
    """Settings in effect, in torch's spelling. Initializes CUDA."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    size, threshold = int(found["max_split_size"]), float(found["garbage_collection_threshold"])
    return {
        "expandable_segments": str(bool(found["expandable_segments"])),
        "max_split_size_mb": "None" if size in _UNLIMITED else str(size // _MIB),
        "garbage_collection_threshold": f"{threshold:g}" if threshold else "None",
    }


@dataclass
class DeviceCache:
    """Empties the allocator's cache after every `steps`-th optimizer step (None: never); `emptied` counts the times.

    The CPU has no such cache; there only the times are counted.
    """

    place: Place
    steps: int | None
    emptied: int = 0

    def after_step(self, step: int) -> None:
        """Call after optimizer step `step` (from 1)."""
        if self.steps is None or step % self.steps:
            return
        if self.place.kind == "cuda":
            torch.cuda.empty_cache()
        self.emptied += 1

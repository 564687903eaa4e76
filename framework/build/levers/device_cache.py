"""`training.empty_device_cache_steps`: what the allocator holds unused goes back to the driver."""

from dataclasses import dataclass

import torch

from framework.build.place import Place


@dataclass
class DeviceCache:
    """Empties the allocator's cache after every `steps`-th optimizer step (None: never); `emptied` counts the times.

    The CPU has no such cache: there the times are counted and nothing else happens.
    """

    place: Place
    steps: int | None
    emptied: int = 0

    def after_step(self, step: int) -> None:
        """To be called when optimizer step `step`, which counts from 1, is done."""
        if self.steps is None or step % self.steps:
            return
        if self.place.kind == "cuda":
            torch.cuda.empty_cache()
        self.emptied += 1

"""Measured memory, phase by phase: the allocator's counters on a GPU, resident memory on the CPU."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from framework.build.place import Place
from framework.memory.ledger import STEP_PHASES


@dataclass
class Meter:
    """Peaks of a run in bytes. Give `observe` to the step: it is told when each phase begins.

    On the CPU a phase is measured where it ends, which is where a step holds most; `baseline` is what the process held
    before the model was built.
    """

    place: Place
    phases: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    reserved: int = 0
    baseline: int = field(init=False)
    _phase: str = "load"

    def __post_init__(self) -> None:
        self.baseline = 0 if self.place.kind == "cuda" else resident_bytes()

    @property
    def phase(self) -> str:
        """The phase that is running."""
        return self._phase

    def observe(self, phase: str) -> None:
        """Close the phase that was running, note its peak, and begin `phase`."""
        self._close()
        self._phase = phase

    def forget_steps(self) -> None:
        """Measure the phases of a step anew: they are of a smaller size from now on."""
        self._close()
        self.phases = {name: peak for name, peak in self.phases.items() if name not in STEP_PHASES}
        self.allocated = self.reserved = max(self.phases.values(), default=0)
        self._phase = "end"

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Measure something that is no part of the run: within, `allocated` is its peak alone."""
        self._close()
        kept = dict(self.phases), self.allocated, self.reserved
        self.allocated = 0
        yield
        self._close()
        (self.phases, self.allocated, self.reserved), self._phase = kept, "end"

    def _close(self) -> None:
        if self.place.kind == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.place.device)
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.place.device))
            torch.cuda.reset_peak_memory_stats(self.place.device)
        else:
            allocated = resident_bytes()
            self.reserved = max(self.reserved, allocated)
        self.allocated = max(self.allocated, allocated)
        if self._phase != "end":
            self.phases[self._phase] = max(self.phases.get(self._phase, 0), allocated)

    def document(self) -> dict[str, Any]:
        """The `measured` part of memory.json."""
        self._close()
        counter = "torch.cuda allocator" if self.place.kind == "cuda" else "resident memory of the process"
        document: dict[str, Any] = {"counter": counter, "allocated_bytes": self.allocated}
        document["baseline_bytes"] = self.baseline
        document["reserved_bytes"] = self.reserved
        document["phases"] = [{"name": name, "allocated_bytes": peak} for name, peak in self.phases.items()]
        if self.place.kind == "cuda":
            free, total = torch.cuda.mem_get_info(self.place.device)
            document["device_name"] = torch.cuda.get_device_name(self.place.device)
            document["device_bytes"] = total - free
        return document


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, in bytes."""
    return int(psutil.Process().memory_info().rss)

"""Check of free disk and host memory against the plan, before anything is loaded."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from framework.errors import DoesNotFit
from framework.memory.host_use import WORKER_BYTES
from framework.memory.ledger import Plan
from framework.memory.units import size
from framework.run.record.run_folder import held
from framework.schema.plural import counted

_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMORY_USED = Path("/sys/fs/cgroup/memory.current")


def require_capacity(
    plan: Plan, folder: Path | None, workers: int = 0, processes: int = 1, fallback: Path | None = None
) -> None:
    """Raise DoesNotFit naming every shortage. `folder` is the run's (None if another machine writes); its present
    content counts as free. A `fallback` folder needs space for one checkpoint.

    `workers` is the number of batch workers that the plan's host memory includes for each of the `processes` that train
    on this machine.
    """
    disk = _short_of_disk(plan, folder, fallback) if folder is not None else ()
    host = HostMemory.now().shortage(plan, workers, processes)
    short = [*disk, *([host] if host is not None else [])]
    if short:
        raise DoesNotFit("; ".join(short) + ". Nothing was loaded.")


def _short_of_disk(plan: Plan, folder: Path, fallback: Path | None) -> Iterator[str]:
    at, free = _free(folder)
    if plan.disk_bytes > free:
        yield (
            f"the run writes up to {size(plan.disk_bytes)} ({size(plan.checkpoint_bytes)} a checkpoint), "
            f"{at} has {size(free)} free: lower training.save_total_limit, raise training.save_steps "
            "or choose another training.output_dir"
        )
    at, free = _free(fallback) if fallback is not None else (at, free)
    if fallback is not None and plan.checkpoint_bytes > free:
        yield (
            f"training.fallback_dir is for checkpoints of {size(plan.checkpoint_bytes)}, {at} has {size(free)} free: "
            "choose another, or none"
        )


def _free(folder: Path) -> tuple[Path, int]:
    """The nearest existing folder, and the bytes that a run can write below it, replacing present content."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return existing, shutil.disk_usage(existing).free + _held(folder)


@dataclass(frozen=True)
class HostMemory:
    """Host memory at one moment, in bytes: `free`, and `held` by this process, which a process that trains instead also
    holds."""

    free: int
    held: int

    @classmethod
    def now(cls) -> "HostMemory":
        return cls(available_host_bytes(), psutil.Process().memory_info().rss)

    def shortage(self, plan: Plan, workers: int, processes: int) -> str | None:
        """The shortage of a plan for the `processes` of this machine with `workers` each; None if memory suffices."""
        held, needed = self.held * processes, plan.host_needed(processes)
        if (missing := needed - held) <= self.free:
            return None
        among = f" for {counted(processes, 'process', 'processes')}" if processes > 1 else ""
        pinned = plan.host.pinned_bytes * processes
        among += f" ({size(pinned)} of it pinned)" if pinned else ""
        text = f"the run needs up to {size(needed)} of host memory{among}, {size(held + self.free)} is available"
        left = workers - -(-(missing - self.free) // (WORKER_BYTES * processes))
        if workers and left >= 0:
            text += f": enough for {left} of the {workers} data.workers ({size(WORKER_BYTES)} each)"
        return text


def available_host_bytes() -> int:
    """Host memory still available: the system's, or what remains of the container's limit."""
    system = int(psutil.virtual_memory().available)
    try:
        return min(system, int(_MEMORY_LIMIT.read_text()) - int(_MEMORY_USED.read_text()))
    except (OSError, ValueError):  # no limit, or no such file
        return system


def _held(folder: Path) -> int:
    """Bytes of an earlier or interrupted run in the folder, which new saves will replace."""
    files = (file for path in held(folder) for file in (path, *path.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


def too_large(plan: Plan) -> str:
    """One sentence with the plan's upper bound, the usable memory and the largest term."""
    upper, usable = plan.peak.device_bytes_upper, plan.device.usable_bytes or 0
    terms = plan.peak.terms.to_json()
    largest = max(terms, key=lambda name: terms[name])
    return (
        f"the run needs up to {upper / 2**30:.2f} GiB in {plan.peak.phase}, {plan.device.name} has "
        f"{usable / 2**30:.2f} GiB usable; most is {largest} ({terms[largest] / 2**30:.2f} GiB)."
    )

"""When memory runs out: what is kept of the moment, and what the user is told."""

import contextlib
import json
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from framework.build.place import Place
from framework.errors import OutOfMemory
from framework.memory.explain import explain_evidence
from framework.memory.explain.causes import Circumstances, growth_per_step
from framework.memory.explain.evidence import PLAN, REPORT, Evidence, SavedPlan, write_circumstances
from framework.memory.explain.messages import is_out_of_memory
from framework.memory.explain.text import explanation_lines
from framework.memory.ledger import PHASES, Plan
from framework.memory.units import size
from framework.run.planning.capacity import available_host_bytes
from framework.run.planning.what_if import lever_savings
from framework.run.record.layout import aside_of, discard, replace_file
from framework.run.record.meter import Meter, resident_bytes
from framework.run.record.run_folder import SNAPSHOT
from framework.schema.config import TrainingConfig

HISTORY = 50_000
"""Allocations and frees that a snapshot goes back: a few steps of a large model, some 10 MB."""
FLOORS = 160
"""Steps whose allocated floor is kept: three stairs of a leak that comes with each evaluation or epoch."""
SURE = 14
"""Steps after which growth is told: a process that starts fills caches, and a warning must come within 20."""
SOON = 20
"""Steps to the end at which it is told again."""


@dataclass(frozen=True)
class PlannedRun:
    """What a run is, and what was predicted of it. `is_alone`: no other rank hangs while its end is explained."""

    config: TrainingConfig
    plan: Plan
    is_alone: bool = True

    def with_savings(self, folder: Path | None) -> SavedPlan:
        """The plan, and what each lever would save, found out now; kept in `folder` for who asks later."""
        document = self.plan.to_json()
        if self.is_alone:
            document["levers"] = lever_savings(self.config, self.plan)
            if folder is not None:
                with contextlib.suppress(OSError):
                    replace_file(folder / PLAN, json.dumps(document, indent=2) + "\n")
        return SavedPlan.model_validate(document)


@dataclass(frozen=True)
class Growth:
    """What stays allocated grows, as found after `step`: memory is full at step `full_at` if it goes on."""

    per_step: int
    step: int
    full_at: int

    def __str__(self) -> str:
        return (
            f"what stays allocated grows by {size(self.per_step)} a step: at this rate memory is full at step "
            f"{self.full_at}. Something is kept from step to step, such as losses in a list with their graphs"
        )


@dataclass
class Watch:
    """What a run knows of its memory from one step to the next. `tokens` are those of each micro batch in hand."""

    meter: Meter
    step: int | None = None
    tokens: Sequence[int] = ()
    floors: deque[int] = field(default_factory=lambda: deque(maxlen=FLOORS))
    largest: int = 0
    micro_batch: int = 0
    """Which micro batch of the step is in hand, from 1; 0 before the first."""
    growth: Growth | None = None
    """As it was told last."""

    def begin(self, step: int | None, tokens: Sequence[int]) -> None:
        """A step, or the trial before all, begins with micro batches of so many tokens, padding included."""
        self.step, self.tokens, self.micro_batch = step, tokens, 0

    def observe(self, phase: str) -> None:
        """A phase begins."""
        self.meter.observe(phase)
        self.micro_batch += phase == "forward"

    def end(self) -> Growth | None:
        """The step is done: note what stays allocated, and tell once that it grows, once more when the end is near."""
        self.floors.append(held_bytes(self.meter.place))
        self.largest = max(self.largest, *self.tokens)
        per_step = growth_per_step(tuple(self.floors)) if len(self.floors) > SURE else None
        if per_step is None or self.step is None:
            return None
        found = Growth(per_step, self.step, self.step + headroom_bytes(self.meter) // per_step)
        is_news = self.growth is None or (found.full_at - self.step <= SOON < self.growth.full_at - self.growth.step)
        if is_news:
            self.growth = found
        return found if is_news else None

    def document(self) -> dict[str, Any]:
        """What `memory.json` says of the floor: what stayed allocated after each of the last steps, and growth."""
        growth = asdict(self.growth) if self.growth is not None else None
        return {"floors": {"last_step": self.step, "bytes": list(self.floors)}, "growth": growth}

    def circumstances(self) -> Circumstances:
        """What is known at this moment."""
        phase = self.meter.phase if self.meter.phase in PHASES else None
        batch = max(self.tokens, default=0) if phase in ("forward", "loss", "backward") else 0
        return Circumstances(phase, self.step, tuple(self.floors), batch or None, self.largest or None)


def held_bytes(place: Place) -> int:
    """What is allocated now: on the card, or on the CPU the process's resident memory."""
    return torch.cuda.memory_allocated(place.device) if place.kind == "cuda" else resident_bytes()


def headroom_bytes(meter: Meter) -> int:
    """What can still be taken at the moment of a step that needs most: of the card, or of the host's memory."""
    if meter.place.kind != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(meter.place.device)
    return max(free + torch.cuda.memory_reserved(meter.place.device) - meter.allocated, 0)


def is_memory_failure(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, the card's or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_out_of_memory(f"RuntimeError: {error}")


@contextlib.contextmanager
def recorded_memory(place: Place) -> Iterator[None]:
    """Have the allocator remember its latest events, so that a snapshot shows how memory filled up.

    Without stack traces: they cost time at every allocation, and Python's, together with checkpointing and compiled
    blocks, have ended a run (torch 2.11, an H100: "SystemError: ... returned NULL").
    """
    if place.kind != "cuda":
        yield
        return
    remember = torch.cuda.memory._record_memory_history
    remember(enabled="all", context=None, stacks="python", max_entries=HISTORY)
    try:
        yield
    finally:
        remember(enabled=None)


@contextlib.contextmanager
def explained_failures(watch: Watch, planned: PlannedRun | None, folder: Path | None) -> Iterator[None]:
    """Within the block, memory that runs out is reported, kept in `folder` (None: there is none yet) and explained.

    Raises OutOfMemory in its place.
    """
    try:
        yield
    except Exception as error:
        if not is_memory_failure(error):
            raise
        circumstances = watch.circumstances()
        text = "".join(traceback.format_exception(error))
        kept = keep_moment(text, circumstances, watch.meter.place, folder) if folder is not None else []
        more = [f"kept in {folder}: {', '.join(kept)}; `tunesmith explain {folder}` says this again"] if kept else []
        raise explained(text, circumstances, planned, folder, more) from None


def explained(
    text: str, circumstances: Circumstances, planned: PlannedRun | None, folder: Path | None, more: Sequence[str]
) -> OutOfMemory:
    """The failure with its explanation, which may take a minute, and `more` lines."""
    plan = planned.with_savings(folder) if planned is not None else None
    lines = explanation_lines(explain_evidence(Evidence(text, circumstances, plan)))
    return OutOfMemory("\n".join([*lines, *more]))


def keep_moment(text: str, circumstances: Circumstances, place: Place, folder: Path) -> list[str]:
    """Write what is left of the moment; names of the files. A disk that is full must not hide the failure itself."""
    summary = torch.cuda.memory_summary(place.device) if place.kind == "cuda" else ""
    kept = []
    with contextlib.suppress(OSError):
        replace_file(folder / REPORT, f"{write_circumstances(circumstances)}\n{text}\n{summary}")
        kept.append(REPORT)
    if place.kind == "cuda":
        with contextlib.suppress(OSError, RuntimeError):
            aside = aside_of(folder / SNAPSHOT)
            discard(aside)
            torch.cuda.memory._dump_snapshot(str(aside))  # type: ignore[no-untyped-call]
            aside.replace(folder / SNAPSHOT)
            kept.append(SNAPSHOT)
    return kept

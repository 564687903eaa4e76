"""Reports when memory runs out: the files kept for analysis, and the explanation for the user."""

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
"""Allocations and frees recorded in a snapshot: a few steps of a large model, some 10 MB."""
FLOORS = 160
"""Steps whose allocated floor is kept: enough for three jumps of a leak at each evaluation or epoch."""
SURE = 14
"""Steps before growth is reported: a new process fills caches first, and a warning must come within 20."""
SOON = 20
"""Steps before memory is full at which growth is reported again."""


@dataclass(frozen=True)
class PlannedRun:
    """A run and its plan. `is_alone`: no other rank waits while a failure is explained."""

    config: TrainingConfig
    plan: Plan
    is_alone: bool = True

    def with_savings(self, folder: Path | None) -> SavedPlan:
        """The plan with the saving of each lever, computed now and stored in `folder` for `explain`."""
        document = self.plan.to_json()
        if self.is_alone:
            document["levers"] = lever_savings(self.config, self.plan)
            if folder is not None:
                with contextlib.suppress(OSError):
                    replace_file(folder / PLAN, json.dumps(document, indent=2) + "\n")
        return SavedPlan.model_validate(document)


@dataclass(frozen=True)
class Growth:
    """Growth of the memory that stays allocated, found after `step`. At this rate memory is full at step `full_at`."""

    per_step: int
    step: int
    full_at: int

    def __str__(self) -> str:
        return (
            f"memory that stays allocated grows by {size(self.per_step)} per step: at this rate it is full at step "
            f"{self.full_at}. Something is kept from step to step, such as a list of losses with their graphs"
        )


@dataclass
class Watch:
    """A run's record of its memory across steps. `tokens` are those of each micro-batch of the current step."""

    meter: Meter
    step: int | None = None
    tokens: Sequence[int] = ()
    floors: deque[int] = field(default_factory=lambda: deque(maxlen=FLOORS))
    largest: int = 0
    micro_batch: int = 0
    """Number of the current micro-batch, from 1; 0 before the first."""
    growth: Growth | None = None
    """Growth as last reported."""

    def begin(self, step: int | None, tokens: Sequence[int]) -> None:
        """Begin a step, or the trial before the first, with micro-batches of so many tokens, padding included."""
        self.step, self.tokens, self.micro_batch = step, tokens, 0

    def observe(self, phase: str) -> None:
        """Begin a phase."""
        self.meter.observe(phase)
        self.micro_batch += phase == "forward"

    def end(self) -> Growth | None:
        """End the step and record what stays allocated. Returns growth once when found, and again when memory is nearly
        full."""
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
        """The part of `memory.json` about the floor: bytes allocated after each of the last steps, and growth."""
        growth = asdict(self.growth) if self.growth is not None else None
        return {"floors": {"last_step": self.step, "bytes": list(self.floors)}, "growth": growth}

    def circumstances(self) -> Circumstances:
        """Circumstances of this moment, for an explanation."""
        phase = self.meter.phase if self.meter.phase in PHASES else None
        batch = max(self.tokens, default=0) if phase in ("forward", "loss", "backward") else 0
        return Circumstances(phase, self.step, tuple(self.floors), batch or None, self.largest or None)


def held_bytes(place: Place) -> int:
    """Bytes allocated on the card now, or on the CPU the process's resident memory."""
    return torch.cuda.memory_allocated(place.device) if place.kind == "cuda" else resident_bytes()


def headroom_bytes(meter: Meter) -> int:
    """Bytes still available at the peak of a step, on the card or in the host's memory."""
    if meter.place.kind != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(meter.place.device)
    return max(free + torch.cuda.memory_reserved(meter.place.device) - meter.allocated, 0)


def is_memory_failure(error: BaseException) -> bool:
    """Whether an exception means that the card's or the host's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_out_of_memory(f"RuntimeError: {error}")


@contextlib.contextmanager
def recorded_memory(place: Place) -> Iterator[None]:
    """Record the allocator's latest events within the block, so that a snapshot shows how memory filled up.

    Without stack traces: they cost time at every allocation, and Python traces combined with checkpointing and compiled
    blocks have crashed a run (torch 2.11, an H100: "SystemError: ... returned NULL").
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
    """Turn an out-of-memory error within the block into OutOfMemory with an explanation, and store reports in `folder`
    (None: there is no folder yet).
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
    """The error with its explanation, which may take a minute, and `more` lines."""
    plan = planned.with_savings(folder) if planned is not None else None
    lines = explanation_lines(explain_evidence(Evidence(text, circumstances, plan)))
    return OutOfMemory("\n".join([*lines, *more]))


def keep_moment(text: str, circumstances: Circumstances, place: Place, folder: Path) -> list[str]:
    """Write reports of the failure and return their file names. A full disk must not hide the failure itself."""
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

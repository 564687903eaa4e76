"""Explanation of a failure from its text: cause, arithmetic, and ranked overrides to paste. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.explain.causes import Cause, Circumstances, find_cause, held_by_others
from framework.memory.explain.evidence import Evidence, gather, plan_of
from framework.memory.explain.lines import is_pinning, makes_states, read_frames, read_phase
from framework.memory.explain.messages import Message, read_message
from framework.memory.explain.moves import Move, rank_moves
from framework.memory.explain.shapes import Kind

__all__ = ["Explanation", "explain", "explain_evidence"]


@dataclass(frozen=True)
class Explanation:
    """What failed, in which phase (None: not known from the text), why, and what to do about it.

    `state_bytes` are those of the optimizer states created in the first step, from the plan; None elsewhere.
    """

    message: Message
    cause: Cause
    phase: str | None
    is_first_step: bool
    circumstances: Circumstances
    moves: tuple[Move, ...]
    has_plan: bool
    planned_bytes: int | None = None
    """Allocated bytes that the plan predicts for the phase."""
    state_bytes: int | None = None
    lacks_savings: bool = False
    """Whether memory ran out in a run with a plan whose lever savings are not computed yet."""

    def __repr__(self) -> str:
        where = f" in {self.phase}" if self.phase is not None else ""
        attempts = f"; try {self.moves[0].override}" if self.moves else ""
        return f"<Explanation: {self.message.kind}{where}, cause {self.cause}{attempts}>"

    def to_json(self) -> dict[str, Any]:
        """The document of `explain --json`."""
        message = self.message
        others = held_by_others(message) if self.cause is Cause.OTHER_PROCESS else message.other_process_bytes
        return {
            "kind": str(message.kind),
            "phase": self.phase,
            "cause": str(self.cause),
            "request_bytes": message.request_bytes,
            "capacity_bytes": message.capacity_bytes,
            "free_bytes": message.free_bytes,
            "allocated_bytes": message.allocated_bytes,
            "reserved_unallocated_bytes": message.reserved_unallocated_bytes,
            "other_process_bytes": others,
            "moves": [move.to_json() for move in self.moves],
            "repairs": [repair.to_json() for repair in self.circumstances.repairs],
        }


def explain(source: str | Path, run: str | Path | None = None) -> Explanation:
    """Explain a run folder, a log file, or, if no such file exists, `source` itself as the text.

    `run` is the folder whose `plan.json` has the savings of each lever, by default the folder of the log. Raises
    RequestError if the text reports no known kind of failure, or `run` has no plan.
    """
    folder = Path(run) if run is not None else None
    if isinstance(source, Path) or ("\n" not in source and len(source) < 1024 and Path(source).exists()):
        return explain_evidence(gather(Path(source), folder))
    return explain_evidence(Evidence(source, plan=plan_of(folder) if folder else None))


def explain_evidence(evidence: Evidence) -> Explanation:
    """Explain gathered evidence. Raises RequestError if the text reports no known kind of failure."""
    found = read_message(evidence.text)
    if found is None:
        reason = "this text reports no known kind of failure: out of memory, a loss that is not finite, or a hang"
        raise RequestError([Problem("", reason, expected="the log with the error message itself")])
    message, lines = found
    frames = read_frames(lines, message.line)
    known, plan = evidence.circumstances, evidence.plan
    phase = known.phase or read_phase(frames)
    cause = find_cause(message, known, is_pinning(frames))
    is_memory = message.kind is Kind.OUT_OF_MEMORY
    planned = plan.phase(phase) if plan else None
    is_first = phase == "optimizer_step" and (known.step == 1 or makes_states(frames))
    return Explanation(
        message=message,
        cause=cause,
        phase=phase,
        is_first_step=is_first,
        circumstances=known,
        moves=rank_moves(plan, phase, cause, known.repairs) if is_memory else (),
        has_plan=plan is not None,
        planned_bytes=planned.allocated_bytes if planned else None,
        state_bytes=planned.terms.get("optimizer") if planned and is_first else None,
        lacks_savings=is_memory and plan is not None and plan.levers is None,
    )

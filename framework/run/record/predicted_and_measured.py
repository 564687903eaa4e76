"""Comparison of predicted and measured memory: `memory.json` and the last line of a run."""

from collections.abc import Mapping
from typing import Any

from framework.memory.ledger import PHASES, Plan
from framework.memory.units import size


def compare(plan: Plan | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The document of memory.json. Errors are (predicted - measured) / measured; null without a plan.

    Phases known to only one side have no error; `timeline` has both sides in the order of a run. On a GPU both are the
    allocator's bytes; on the CPU the process's memory before the model was built (`baseline_bytes`) is subtracted from
    the measured side first.
    """
    baseline = measured["baseline_bytes"]
    phases = {phase["name"]: phase["allocated_bytes"] - baseline for phase in measured["phases"]}
    predicted = {phase.name: phase.allocated_bytes for phase in plan.phases} if plan is not None else {}
    errors = {name: _error(predicted[name], phases[name]) for name in phases if name in predicted}
    document = plan.to_json() if plan is not None else {}
    kept = {name: document[name] for name in ("device", "peak", "step_peak", "phases", "terms") if name in document}
    return {
        "predicted": kept or None,
        "measured": dict(measured),
        "timeline": [
            {"name": name, "predicted_bytes": predicted.get(name), "measured_bytes": phases.get(name)}
            for name in PHASES
            if name in predicted or name in phases
        ],
        "error": {
            "allocated": _error(plan.peak.allocated_bytes, measured["allocated_bytes"] - baseline),
            "phases": errors,
        }
        if plan is not None
        else None,
    }


def _error(predicted: int, measured: int) -> float | None:
    return round(predicted / measured - 1, 6) if measured > 0 else None


def last_line(document: Mapping[str, Any]) -> str:
    """Peak memory in one sentence: on a card with the prediction's error; on the CPU with both numbers only, since a
    process reuses memory that it freed before and keeps what tensors free."""
    measured, predicted = document["measured"], document["predicted"]
    peak, baseline = measured["allocated_bytes"], measured["baseline_bytes"]
    planned = predicted["peak"]["allocated_bytes"] if predicted is not None else None
    if not baseline:
        text = f"peak memory {size(peak)} ({measured['counter']})"
        return (
            text
            if planned is None
            else f"{text}; predicted {size(planned)}, error {document['error']['allocated']:+.1%}"
        )
    text = f"peak memory {size(peak)} of the whole process, which held {size(baseline)} before the model was built"
    if planned is None:
        return text
    return f"{text}; predicted {size(planned)} for tensors only, some of which take memory that was freed before"

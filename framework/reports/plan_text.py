"""Texts and figures of a plan, for every kind of output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.memory.ledger import PeakUse, Plan, Terms
from framework.memory.units import GIB as GIB
from framework.memory.units import MIB as MIB
from framework.memory.units import size as size
from framework.schema.config import Batch

if TYPE_CHECKING:
    from framework.run.planning.measurements import Measured

TERMS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "autocast_copies": "autocast copies",
    "temporaries": "temporaries",
    "communication": "communication",
    "fragmentation": "cached, not in use",
    "overhead": "driver and kernels",
    "unattributed": "unknown purpose",
}
"""Key of `terms` in `plan --json` -> displayed name."""

PHASES: Mapping[str, str] = {"optimizer_step": "optimizer step", "start": "start from rows"}
"""Displayed names of phases, where they differ from the key."""

MEASURED = ("device_name", "allocated_bytes", "reserved_bytes", "device_bytes", "step_seconds", "tokens_per_second")
"""The keys of `measured` in `plan --json`."""


@dataclass(frozen=True)
class Verdict:
    """Whether the run fits: a headline, and sentences with the figures."""

    fits: bool
    is_compared: bool
    """False if there is no card to compare with."""
    headline: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A predicted and measured figure. `error` is predicted / measured - 1."""

    name: str
    predicted: str
    measured: str
    error: float | None


def verdict(plan: Plan) -> Verdict:
    """The verdict of a plan."""
    expected, upper = plan.peak.device_bytes, plan.peak.device_bytes_upper
    usable, name = plan.device.usable_bytes, plan.device.name
    if usable is None:
        return _verdict_without_card(plan)
    several = plan.device.count > 1
    name = f"each of {plan.device.count} {name}" if several else name
    if upper <= usable:
        headline = f"fits on {name}: up to {size(upper)} of {size(usable)} usable, {size(usable - upper)} left"
    else:
        judged = "does not fit" if expected > usable else "is not sure to fit"
        room = f"{size(usable)} is usable, {size(upper - usable)} missing"
        headline = f"{judged} on {name}: needs up to {size(upper)}, {room}"
    details = (f"{size(expected)} is expected, the rest is the uncertainty of the plan.", peak_sentence(plan.peak))
    return Verdict(upper <= usable, True, headline, details)


def _verdict_without_card(plan: Plan) -> Verdict:
    taken = size(plan.peak.device_bytes)
    if plan.device.name == "cpu":
        headline = f"is planned for this machine's CPU: tensors take {taken} of main memory"
        meaning = "There is no card to compare with. Host memory, below, counts Python's libraries too."
    else:
        headline = f"is planned for {plan.device.name}: {taken} expected"
        meaning = "How much of this card is usable is not known, so there is nothing to compare with."
    return Verdict(True, False, headline, (meaning, peak_sentence(plan.peak)))


def peak_sentence(peak: PeakUse) -> str:
    """A sentence with the phase of the peak and its largest term."""
    name, count = term_rows(peak.terms)[0]
    share = f"{size(count)} ({count / peak.device_bytes:.0%})"
    return f"The peak is in {phase_name(peak.phase)}; its largest term is {name}, {share}."


def term_rows(terms: Terms) -> list[tuple[str, int]]:
    """Name and bytes of every nonzero term, the largest first."""
    rows = [(TERMS[key], count) for key, count in terms.to_json().items() if count]
    return sorted(rows, key=lambda row: -row[1])


SHARDS_HEADING = ("Shards of weights", "stored", "computed", "reduced", "stepped")


def shard_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Dtypes of a plan's shards, a row for each kind of weights, under `SHARDS_HEADING`."""
    rows = ((each.weights, each.stored, each.computed, each.reduced, each.stepped) for each in plan.shards)
    return [tuple(cell or "-" for cell in row) for row in rows]


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Facts of a plan other than device memory, as name and sentence."""
    batch, step = plan.batch, plan.step
    equation = Batch(batch.per_device, batch.accumulation, batch.world, batch.context, batch.tensor)
    share = "all trained"
    if plan.trainable_parameters != plan.total_parameters > 0:
        share = f"{plan.trainable_parameters:,} trained ({plan.trainable_parameters / plan.total_parameters:.2%})"
    found = [
        ("parameters", f"{plan.total_parameters:,}, {share}"),
        (
            "batch",
            f"{equation}; rows of {batch.sequence_length:,} tokens",
        ),
    ]
    if step is None:
        found.append(("step", f"the speed of {plan.device.name} is not known"))
    else:
        each = " on each device" if plan.device.count > 1 else ""
        rate = f"{step.tokens_per_second:,.0f} tokens a second{each}"
        speed = f"{duration(step.seconds)}, {rate}, bound by {step.bound_by}"
        found.append(("step", speed))
    if plan.run_hours is not None:
        found.append(("whole run", f"{duration(plan.run_hours * 3600)}, evaluation and saving not counted"))
    elif step is not None:
        found.append(("whole run", "not known: training.max_steps is not set, and a plan reads no data"))
    if plan.device.name != "cpu":
        counters = f"{size(plan.peak.allocated_bytes)} allocated, {size(plan.peak.reserved_bytes)} reserved"
        found.append(("torch counters", counters))
    found.append(("host memory", _host_memory(plan)))
    each = f"checkpoints of {size(plan.checkpoint_bytes)} at their most, and the export"
    found.append(("disk", f"{size(plan.disk_bytes)}: {each}"))
    return found


def _host_memory(plan: Plan) -> str:
    """Host memory of a machine's processes, as a sentence."""
    host = plan.host
    if host.processes == 1:
        pinned = f", {size(host.pinned_bytes)} of it pinned" if host.pinned_bytes else ""
        end = f"; {size(host.end_bytes)} of it only if free, to write all files at a time" if host.end_bytes else ""
        return f"{size(plan.host_bytes)} for each process{pinned}{end}"
    together = f"{size(plan.host_bytes_of(host.processes))} for the {host.processes} processes of a machine"
    pinned = f", {size(host.pinned_bytes * host.processes)} of it pinned" if host.pinned_bytes else ""
    each = f"{size(plan.host_bytes)} for the first, {size(host.other_bytes)} for each other"
    return f"{together}{pinned}: {each}; tensors take {size(host.load_bytes)} of it while the model loads"


def measured_rows(plan: Plan, measured: "Measured") -> list[Row]:
    """Predicted and measured figures for forward to optimizer step."""
    peak, step = plan.step_peak, plan.step
    rows = [
        _row("allocated", peak.allocated_bytes, measured.allocated_bytes),
        _row("reserved", peak.reserved_bytes, measured.reserved_bytes),
        _row("on the device", peak.device_bytes, measured.device_bytes),
    ]
    seconds = measured.step_seconds
    if step is None:
        return [*rows, Row("step", "not known", duration(seconds), None)]
    speed = f"{step.tokens_per_second:,.0f}", f"{measured.tokens_per_second:,.0f}"
    return [
        *rows,
        Row("step", duration(step.seconds), duration(seconds), step.seconds / seconds - 1),
        Row("tokens a second", *speed, step.tokens_per_second / measured.tokens_per_second - 1),
    ]


def _row(name: str, predicted: int, measured: int) -> Row:
    return Row(name, size(predicted), size(measured), predicted / measured - 1)


def error(share: float | None) -> str:
    """An error in percent with its sign; positive means over-predicted."""
    return "" if share is None else f"{share:+.2%}"


def measured_document(measured: "Measured") -> dict[str, object]:
    """`measured` of `plan --json`."""
    return {name: getattr(measured, name) for name in MEASURED}


def phase_name(key: str) -> str:
    """Displayed name of a phase."""
    return PHASES.get(key, key)


def signed_size(count: int) -> str:
    """A difference in bytes with its sign."""
    return f"{'+' if count > 0 else ''}{size(count)}" if count else "0"


def unit_of(largest: int) -> tuple[str, int]:
    """The unit for a column of sizes up to `largest`, and its bytes."""
    return ("GiB", GIB) if largest >= GIB else ("MiB", MIB)


def duration(seconds: float) -> str:
    """Format seconds: `71 ms`, `2.31 s`, `12.5 min`, `3.2 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"

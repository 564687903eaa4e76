"""`Plan`: predicted memory and time of a run, by term and by phase. Plain numbers; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from framework.escaping import paragraph, table
from framework.memory.allocator import Peak
from framework.memory.bands import Uncertainty
from framework.memory.declared import declared
from framework.memory.trace import Kind
from framework.memory.units import size

PLAN_VERSION = 1
"""`schema_version` of `plan --json`."""

STEP_PHASES = ("forward", "loss", "backward", "optimizer_step")
PHASES = ("load", "start", *STEP_PHASES, "eval", "save", "resume")
"""The phases of a run, in the order of a plan. `start` are passes over rows that initialize an adapter."""


@dataclass(frozen=True)
class Device:
    """The card of a plan. `usable_bytes` is None if there is no limit to compare with."""

    name: str
    count: int
    capacity_bytes: int | None
    usable_bytes: int | None


@dataclass(frozen=True)
class Terms:
    """Bytes on the device at one moment, by purpose. They add up to that moment's `device_bytes`.

    `fragmentation` is memory that the allocator holds unused, `overhead` the driver's context; `optimizer` includes
    paged states in managed memory.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits_and_loss: int = 0
    autocast_copies: int = 0
    temporaries: int = 0
    communication: int = 0
    fragmentation: int = 0
    overhead: int = 0
    unattributed: int = 0

    @property
    def total(self) -> int:
        return sum(self.to_json().values())

    def to_json(self) -> dict[str, int]:
        return {term.name: getattr(self, term.name) for term in fields(self)}


@dataclass(frozen=True)
class PeakUse:
    """The moment of maximum use. `allocated` and `reserved` are torch's counters, `device_bytes` the driver's."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    managed_bytes: int
    device_bytes: int
    device_bytes_upper: int
    terms: Terms

    def to_json(self) -> dict[str, Any]:
        names = [item.name for item in fields(self) if item.name != "terms"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PhaseUse:
    """Maximum use within one phase of the run. `terms` add up to `device_bytes`.

    `host_bytes` are tensors in host memory, pinned or not; on the CPU they are counted as device memory.
    """

    name: str
    allocated_bytes: int
    device_bytes: int
    terms: Terms
    host_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        sizes = {"allocated_bytes": self.allocated_bytes, "device_bytes": self.device_bytes}
        sizes["host_bytes"] = self.host_bytes
        return {"name": self.name, **sizes, "terms": self.terms.to_json()}


@dataclass(frozen=True)
class StepCost:
    """Time of one optimizer step on one device; tokens include padding.

    `model_flops` are 6 per token and trained weight, 4 per frozen one, and attention, without recomputation.
    """

    seconds: float
    tokens_per_second: float
    model_flops: int
    bound_by: str

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_flops": self.model_flops,
            "bound_by": self.bound_by,
        }


@dataclass(frozen=True)
class BatchUse:
    """The batch equation and the planned length."""

    per_device: int
    accumulation: int
    world: int
    sequence_length: int
    context: int = 1
    """Context-parallel size; `world` then counts groups of devices."""
    tensor: int = 1
    """Tensor-parallel size; likewise."""

    def to_json(self) -> dict[str, int]:
        return {
            "per_device": self.per_device,
            "accumulation": self.accumulation,
            "world": self.world,
            "global": self.per_device * self.accumulation * self.world,
            "sequence_length": self.sequence_length,
            "context": self.context,
            "tensor": self.tensor,
        }


@dataclass(frozen=True)
class HostUse:
    """Host memory of a machine's `processes`, in bytes. The first one, which saves, has the plan's `host_bytes`."""

    processes: int = 1
    other_bytes: int = 0
    """Bytes of each process except the first."""
    pinned_bytes: int = 0
    """Pinned bytes of each process."""
    load_bytes: int = 0
    """Tensors of all processes while the model loads, without the processes' own memory."""
    end_bytes: int = 0
    """Part of the first process's memory that it takes only where it is free: it writes checkpoint and export at a time
    at the end, otherwise one after the other."""

    def to_json(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class ShardDtypes:
    """Dtypes of some sharded weights: as stored, as computed with after gathering, and for trained ones those of
    gradient reduction and optimizer step."""

    weights: str
    stored: str
    computed: str
    reduced: str | None = None
    stepped: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class Plan:
    """Predicted memory and time of a run per device, in bytes and seconds; `to_json` is the output of `plan --json`."""

    device: Device
    peak: PeakUse
    step_peak: PeakUse
    phases: tuple[PhaseUse, ...]
    host_bytes: int
    disk_bytes: int
    checkpoint_bytes: int
    """Size of one checkpoint: trained weights and optimizer states."""
    step: StepCost | None
    run_hours: float | None
    batch: BatchUse
    total_parameters: int
    trainable_parameters: int
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    host: HostUse = HostUse()
    shards: tuple[ShardDtypes, ...] = ()
    """For trained and for frozen weights; empty if nothing is sharded."""

    def host_bytes_of(self, processes: int) -> int:
        """Most host memory of this many processes of a machine, including the first."""
        return self.host_bytes + (processes - 1) * self.host.other_bytes

    def host_needed(self, processes: int) -> int:
        """The same without what is taken only where it is free."""
        return self.host_bytes_of(processes) - self.host.end_bytes

    @property
    def fits(self) -> bool:
        """Whether the upper bound is within the card's usable memory; true if that is unknown."""
        usable = self.device.usable_bytes
        return usable is None or self.peak.device_bytes_upper <= usable

    def __repr__(self) -> str:
        return f"<Plan: {self._verdict}>"

    def _repr_html_(self) -> str:
        """Tables of the phases and of the terms at the peak, for notebooks."""
        named = sorted(self.peak.terms.to_json().items(), key=lambda item: -item[1])
        phases = [(phase.name, size(phase.allocated_bytes), size(phase.device_bytes)) for phase in self.phases]
        terms = [(name, size(count), f"{count / self.peak.device_bytes:.1%}") for name, count in named if count]
        parts = [
            paragraph(f"Plan: {self._verdict}"),
            table(("phase", "allocated", "on the device"), phases),
            table((f"at the peak ({self.peak.phase})", "bytes", "share"), terms),
            *(paragraph(f"warning: {warning}") for warning in self.warnings),
        ]
        return "".join(parts)

    @property
    def _verdict(self) -> str:
        """The verdict in one line."""
        device, upper = self.device, self.peak.device_bytes_upper
        name = device.name if device.count == 1 else f"each of {device.count} {device.name}"
        room = f" of {size(device.usable_bytes)} usable" if device.usable_bytes is not None else ""
        speed = f", {self.step.seconds:.3g} s a step" if self.step is not None else ""
        verdict = "fits" if self.fits else "does not fit"
        return f"{verdict} on {name}: {size(self.peak.device_bytes)}, up to {size(upper)}{room}{speed}"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": PLAN_VERSION,
            "device": {item.name: getattr(self.device, item.name) for item in fields(self.device)},
            "fits": self.fits,
            "peak": self.peak.to_json(),
            "terms": self.peak.terms.to_json(),
            "step_peak": {**self.step_peak.to_json(), "terms": self.step_peak.terms.to_json()},
            "phases": [phase.to_json() for phase in self.phases],
            "host_bytes": self.host_bytes,
            "host": self.host.to_json() | {"all_bytes": self.host_bytes_of(self.host.processes)},
            "disk_bytes": self.disk_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "step": self.step.to_json() if self.step is not None else None,
            "run_hours": self.run_hours,
            "batch": self.batch.to_json(),
            "parameters": {"total": self.total_parameters, "trainable": self.trainable_parameters},
            "shards": [each.to_json() for each in self.shards],
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Plan":
        """Read the output of `to_json`. Raises KeyError or TypeError for any other document."""
        step = document["step"]
        batch = {name: value for name, value in document["batch"].items() if name != "global"}
        plan = cls(
            device=Device(**document["device"]),
            peak=PeakUse(**document["peak"], terms=Terms(**document["terms"])),
            step_peak=PeakUse(**{**document["step_peak"], "terms": Terms(**document["step_peak"]["terms"])}),
            phases=tuple(PhaseUse(**{**phase, "terms": Terms(**phase["terms"])}) for phase in document["phases"]),
            host_bytes=document["host_bytes"],
            disk_bytes=document["disk_bytes"],
            checkpoint_bytes=document["checkpoint_bytes"],
            step=StepCost(**step) if step is not None else None,
            run_hours=document["run_hours"],
            batch=BatchUse(**batch),
            total_parameters=document["parameters"]["total"],
            trainable_parameters=document["parameters"]["trainable"],
            shards=tuple(ShardDtypes(**each) for each in document.get("shards", ())),
            assumptions=tuple(document["assumptions"]),
            warnings=tuple(document["warnings"]),
            host=HostUse(**{name: value for name, value in document["host"].items() if name != "all_bytes"}),
        )
        return declared(plan)


def peak_use(peaks: Sequence[Peak], context: int, uncertainty: Uncertainty) -> PeakUse:
    """The largest of `peaks` with its terms. `context` are the bytes of the driver's context.

    Phase and terms are those of the moment with most allocated bytes; `reserved` does not fall by itself, so its
    maximum over the peaks is what the device holds.
    """
    top = max(peaks, key=lambda peak: peak.allocated)
    reserved = max(peak.reserved for peak in peaks)
    managed = max(peak.managed for peak in peaks)
    return PeakUse(
        phase=top.phase,
        allocated_bytes=top.allocated,
        reserved_bytes=reserved,
        managed_bytes=managed,
        device_bytes=reserved + managed + context,
        device_bytes_upper=uncertainty.upper(top.allocated, reserved, managed + context),
        terms=_terms(top, reserved, managed, context),
    )


def _terms(top: Peak, reserved: int, managed: int, context: int) -> Terms:
    """The terms at `top`, for a device with `reserved` and `managed` bytes and a context."""
    kinds = dict(top.kinds)
    kinds[Kind.OPTIMIZER] = kinds.get(Kind.OPTIMIZER, 0) + managed
    return Terms(
        **{str(kind): count for kind, count in kinds.items()},
        fragmentation=reserved - top.allocated,
        overhead=context,
    )


def phase_uses(peaks: Sequence[Peak], context: int) -> tuple[PhaseUse, ...]:
    """One entry for each phase that occurs, in the order of PHASES."""
    found = []
    for name in PHASES:
        own = [peak for peak in peaks if peak.phase == name]
        if own:
            top = max(own, key=lambda peak: peak.allocated)
            fullest = max(own, key=lambda peak: peak.reserved + peak.managed)
            terms = _terms(top, fullest.reserved, fullest.managed, context)
            found.append(PhaseUse(name, top.allocated, terms.total, terms, max(peak.host for peak in own)))
    return tuple(found)

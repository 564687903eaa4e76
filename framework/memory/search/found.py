"""Result of a search: a config, its plan, and the gain of each change. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from framework.escaping import paragraph, table
from framework.memory.ledger import Plan
from framework.memory.levers import format_value
from framework.memory.units import size
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted


@dataclass(frozen=True)
class Change:
    """One changed key. Bytes and seconds are differences between successive plans in the order of the list, so that
    they add up to the difference between request and proposal; None if an intermediate config cannot run."""

    key: str
    old: Any
    new: Any
    saves_bytes: int | None
    costs_seconds: float | None
    exact: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "from": self.old,
            "to": self.new,
            "saves_bytes": self.saves_bytes,
            "costs_seconds": self.costs_seconds,
            "exact": self.exact,
            "why": self.why,
        }


@dataclass(frozen=True)
class Point:
    """One point of the trade-off between speed and memory. `planned`: from a plan of the whole model, otherwise
    extrapolated from plans with fewer layers."""

    overrides: tuple[str, ...]
    device_bytes: int
    tokens_per_second: float | None
    planned: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "overrides": list(self.overrides),
            "device_bytes": self.device_bytes,
            "tokens_per_second": self.tokens_per_second,
            "planned": self.planned,
        }


@dataclass(frozen=True)
class Found:
    """The proposal or, if nothing fits, the closest miss. `plan` is the full plan of `config`."""

    config: TrainingConfig
    plan: Plan
    before: Plan | None
    """Plan of the request as written; None if that cannot run or has `auto` levers."""
    changes: tuple[Change, ...]
    frontier: tuple[Point, ...]
    tried: int
    """Number of candidates decided by plan, extrapolation or bound."""
    planned: int
    """Number of these with a plan of the whole model."""
    computed: int = 0
    """Number of these with planned or extrapolated bytes and seconds; others are no better than one of them."""
    remarks: tuple[str, ...] = ()
    smallest_card: str | None = None
    """If nothing fits, the smallest shipped card that the closest miss is predicted to fit; otherwise None."""
    shortage: str | None = None
    """Shortage of this machine's host memory for `plan`, if it will run here."""

    @property
    def fits(self) -> bool:
        return self.plan.fits and self.shortage is None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The changes as overrides. A micro-batch comes with the global batch, to keep it."""
        return typed({change.key: change.new for change in self.changes}, self.config.batch.global_size)

    @property
    def looked_at(self) -> str:
        """Numbers of candidates: considered, computed, and fully planned."""
        return (
            f"{counted(self.tried, 'candidate')}, {self.computed:,} of them computed, {self.planned} planned as a whole"
        )

    def __repr__(self) -> str:
        return f"<Found: {' '.join(self.overrides) or 'nothing has to change'}; {self.plan!r}>"

    def _repr_html_(self) -> str:
        """Changes with their gains, then the plan, for notebooks."""
        lead = "fits" if self.fits else f"nothing fits, the closest miss{f': {self.shortage}' if self.shortage else ''}"
        rows = []
        for change in self.changes:
            saves, costs = change.saves_bytes, change.costs_seconds
            memory = "-" if saves is None else f"{'-' if saves > 0 else '+'}{size(abs(saves))}"
            seconds = "-" if costs is None else f"{costs:+.3f} s"
            moved = f"{change.key}: {format_value(change.old)} -> {format_value(change.new)}"
            rows.append((moved, memory, seconds, "same" if change.exact else "CHANGED"))
        changes = (
            table(("change", "memory", "a step", "training"), rows) if rows else paragraph("Nothing has to change.")
        )
        return paragraph(f"Found: {lead} ({self.looked_at})") + changes + self.plan._repr_html_()

    def remarking(self, remarks: Iterable[str]) -> "Found":
        """A copy with additional remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "changes": [change.to_json() for change in self.changes],
            "overrides": list(self.overrides),
            "plan": self.plan.to_json(),
            "tried": self.tried,
            "computed": self.computed,
            "planned": self.planned,
            "frontier": [point.to_json() for point in self.frontier],
            "batch_equation": str(self.config.batch),
            "remarks": list(self.remarks),
            "smallest_card": self.smallest_card,
        }


def typed(values: dict[str, Any], global_batch: int) -> tuple[str, ...]:
    """Values of keys as command-line overrides."""
    batch = {"training.global_batch_size": global_batch} if "training.per_device_train_batch_size" in values else {}
    return tuple(f"{key}={format_value(value)}" for key, value in {**values, **batch}.items())

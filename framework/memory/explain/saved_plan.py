"""What an explanation takes from the `plan.json` of a run. The file may be damaged or of another version. No torch."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from framework.regular_files import read_regular

PLAN = "plan.json"
Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Bytes; of a saving they may be negative."""


class _Saved(BaseModel):
    """A mapping of the file. Keys that an explanation does not need are not looked at."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class SavedPhase(_Saved):
    """Allocated bytes at the peak of a phase, and what they are for."""

    name: str
    allocated_bytes: Count
    terms: dict[str, Count] = {}


class SavedPeak(_Saved):
    """The phase of most use."""

    phase: str


class SavedLever(_Saved):
    """A change that can be pasted, and the bytes that it saves in each phase (None: not known yet)."""

    key: str
    override: str
    costs: str
    exact: bool
    saves: dict[str, Count] | None


class SavedPlan(_Saved):
    """The plan of a run, with what each lever would save of it (None: none was asked)."""

    phases: list[SavedPhase]
    step_peak: SavedPeak
    host_bytes: Count
    levers: list[SavedLever] | None = None

    def phase(self, name: str | None) -> SavedPhase | None:
        """The phase of that name, where the plan has it."""
        return next((phase for phase in self.phases if phase.name == name), None)


def read_plan(folder: Path) -> tuple[SavedPlan | None, str]:
    """The plan of a run folder, or None and why there is none."""
    try:
        return SavedPlan.model_validate_json(read_regular(folder / PLAN, "replace")), ""
    except OSError as error:
        return None, str(error.strerror) if (folder / PLAN).exists() else ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return None, f"{where}: {first['msg']}" if where else str(first["msg"])

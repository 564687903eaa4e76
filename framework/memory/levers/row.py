"""A row of the table: a knob, its settings, and what each costs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.schema.params import FrozenMapping


@dataclass(frozen=True)
class Setting:
    """One value of a lever, compared with the lever's first setting."""

    value: Any
    time: str = ""
    """What it costs in time, with the source of the figure; empty for the first setting."""
    changes: str = ""
    """What is different in the trajectory of training. Empty: nothing but rounding."""
    hardware: str = ""
    """What it runs on, of `cpu`, `cuda`, `cuda 8.9` (from that capability on) and `cuda 9.0 to 9.0`, with commas
    between; empty: anything. `framework.memory.requirements` refuses the rest before anything is loaded."""
    package: str = ""
    """Distributions that must be installed, with commas between; empty: none beyond ours."""
    beside: Mapping[str, Any] = FrozenMapping()
    """Other keys without which this value has no effect, with the values they need."""


@dataclass(frozen=True)
class Lever:
    """A knob: where it is, what each setting costs, which terms of the ledger it moves, and who reads it back."""

    key: str
    settings: tuple[Setting, ...]
    """The plain setting first, then from free to dear."""
    shrinks: tuple[str, ...]
    """Terms of `framework.memory.ledger.Terms` that get smaller."""
    reader: str
    """Name in `framework.build.verify.READERS`."""
    line: str
    bitwise: bool = False
    """Whether no bit of a run's weights depends on it, so that a resumed run may change it without `--allow`."""

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(setting.value for setting in self.settings)

    @property
    def exact(self) -> bool:
        """Whether every setting follows the trajectory of the first, but for rounding."""
        return not any(setting.changes for setting in self.settings)

    def to_json(self) -> dict[str, Any]:
        settings = [
            {
                "value": setting.value,
                "time": setting.time,
                "exact": not setting.changes,
                "changes": setting.changes,
                "hardware": setting.hardware,
                "package": setting.package,
                "beside": dict(setting.beside),
            }
            for setting in self.settings
        ]
        facts = {"key": self.key, "line": self.line, "shrinks": list(self.shrinks), "exact": self.exact}
        return {**facts, "reader": self.reader, "settings": settings}

"""Row types of the levers table: a lever, its settings, and their costs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from framework.schema.config import TrainingConfig
from framework.schema.facts import UsedUnless
from framework.schema.keys import uses_of, value_of
from framework.schema.params import FrozenMapping


@dataclass(frozen=True)
class Setting:
    """One value of a lever, compared with the lever's first setting."""

    value: Any
    time: str = ""
    """Cost in time, with the source of the figure; empty for the first setting."""
    changes: str = ""
    """Difference in the training result. Empty: rounding only."""
    hardware: str = ""
    """Supported hardware: `cpu`, `cuda`, `cuda 8.9` (that capability or newer) and `cuda 9.0 to 9.0`, separated by
    commas; empty: any. `framework.memory.requirements` refuses other hardware before anything is loaded."""
    package: str = ""
    """Packages that must be installed, separated by commas; empty: none beyond our own requirements."""
    requires: Mapping[str, Any] = FrozenMapping()
    """Other keys without which this value has no effect, with their required values. Those named by the key's
    definition are added."""


@dataclass(frozen=True)
class Better:
    """A value that is both smaller and faster than another with the same results, on some hardware."""

    than: Any
    value: Any
    hardware: str = ""


@dataclass(frozen=True)
class Axis:
    """The values of a lever that a search may use, and their known order."""

    values: tuple[Any, ...] = ()
    """Values worth trying, from fast and large to slow and small; empty: determined by the batch or by `better`."""
    slower: bool = True
    """Whether later values are never faster than earlier ones at the same batch."""
    smaller: bool = True
    """Whether later values need no more memory than earlier ones."""
    on_host: bool = False
    """Whether later values keep weights or states in host memory: they add a fixed time to each step and do not affect
    memory that grows with the rows of a forward pass. They are tried if no other lever makes the plan fit, or if the
    freed memory may gain more than they cost."""
    better: Better | None = None


@dataclass(frozen=True)
class Lever:
    """A lever: its key, settings with their costs, the terms of the ledger that it reduces, and its verification."""

    key: str
    settings: tuple[Setting, ...]
    """Settings, the plain one first, then by increasing cost."""
    shrinks: tuple[str, ...]
    """Reduced terms of `framework.memory.ledger.Terms`."""
    reader: str
    """Name in `framework.build.verify.READERS`."""
    line: str
    bitwise: bool = False
    """Whether the weights are bitwise independent of it, so that a resumed run may change it without `--allow`."""
    search: Axis | None = None
    """None: it is not searched, and `auto` is not a valid value."""
    proposed: bool = True
    """Whether a message may propose it: its best setting depends neither on the task, nor on names within a model, nor
    on the number of cards."""
    moment: str = ""
    """`training` or `eval` if it affects memory only in that part of a run."""
    least: int = 1
    """The smallest number that is proposed or searched."""

    def __post_init__(self) -> None:
        plain = TrainingConfig()
        uses = [use for use in uses_of(self.key) if not isinstance(use, UsedUnless)]
        implied = {use.key: use.values[0] for use in uses if not use.fits(value_of(plain, use.key))}
        settings = (replace(item, requires=FrozenMapping({**implied, **item.requires})) for item in self.settings)
        object.__setattr__(self, "settings", tuple(settings))

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(setting.value for setting in self.settings)

    @property
    def exact(self) -> bool:
        """Whether every setting gives the results of the first, up to rounding."""
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
                "beside": dict(setting.requires),
            }
            for setting in self.settings
        ]
        facts = {"key": self.key, "line": self.line, "shrinks": list(self.shrinks), "exact": self.exact}
        return {**facts, "reader": self.reader, "settings": settings}

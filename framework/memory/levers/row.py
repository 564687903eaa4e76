"""A row of the table: a knob, its settings, and what each costs. No torch."""

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
    """What it costs in time, with the source of the figure; empty for the first setting."""
    changes: str = ""
    """What is different in the trajectory of training. Empty: nothing but rounding."""
    hardware: str = ""
    """What it runs on, of `cpu`, `cuda`, `cuda 8.9` (from that capability on) and `cuda 9.0 to 9.0`, with commas
    between; empty: anything. `framework.memory.requirements` refuses the rest before anything is loaded."""
    package: str = ""
    """Distributions that must be installed, with commas between; empty: none beyond ours."""
    beside: Mapping[str, Any] = FrozenMapping()
    """Other keys without which this value has no effect, with the values they need. Those that the key's definition
    names are added."""


@dataclass(frozen=True)
class Better:
    """A value that takes less and is faster than another with the same results, on some hardware."""

    than: Any
    value: Any
    hardware: str = ""


@dataclass(frozen=True)
class Axis:
    """What a search may do with a lever, and what it knows before it looks."""

    values: tuple[Any, ...] = ()
    """Those worth trying, from fast and large to slow and small; empty: it follows from the batch, or from `better`."""
    slower: bool = True
    """Whether later values compute or move no less than earlier ones: never faster at the same batch."""
    smaller: bool = True
    """Whether later values take no more memory than earlier ones."""
    on_host: bool = False
    """Whether later values keep weights or states in host memory: a time of its own in each step, and nothing of what
    grows with the rows of a forward pass. Such values are looked at where no other lever makes the plan fit, and where
    what they leave of the card may buy more than they cost."""
    better: Better | None = None


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
    search: Axis | None = None
    """None: no search moves it, and `auto` is no value of it."""
    proposed: bool = True
    """Whether a message may propose it: its right setting depends neither on what is to be learned, nor on names within
    a model, nor on the number of cards."""
    moment: str = ""
    """`training` or `eval` where it moves memory in that part of a run alone."""
    least: int = 1
    """The smallest value of a number that is proposed or searched."""

    def __post_init__(self) -> None:
        plain = TrainingConfig()
        uses = [use for use in uses_of(self.key) if not isinstance(use, UsedUnless)]
        implied = {use.key: use.values[0] for use in uses if not use.fits(value_of(plain, use.key))}
        settings = (replace(item, beside=FrozenMapping({**implied, **item.beside})) for item in self.settings)
        object.__setattr__(self, "settings", tuple(settings))

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

"""Facts of a key, stated where it is defined: `warmup_steps: Annotated[Count | None, STEERING] = None`.

From them follow what a resumed run may change, which keys a comparison of plans passes over, which keys are warned
about because they do nothing, and what a setting of the levers table needs next to it. `framework.schema.keys` looks
them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Resume(StrEnum):
    """What a resumed run that has another value does."""

    FREE = "free"
    """The same, to the last bit of its weights and the order of its rows."""
    ROUNDING = "rounding"
    """The same but for rounding: allowed with `--allow`."""
    STEERING = "steering"
    """Something else from here on, from a checkpoint that still loads: allowed with `--allow`."""


@dataclass(frozen=True)
class Facts:
    """What holds for a key, or for all keys of a section."""

    memory: bool = True
    """Whether a plan of device memory may depend on it."""
    resume: Resume | None = None
    """Unset: as the section around it, else as the levers table says, else another value is refused."""


FREE = Facts(memory=False, resume=Resume.FREE)
STEERING = Facts(memory=False, resume=Resume.STEERING)
NO_MEMORY = Facts(memory=False)


@dataclass(frozen=True)
class UsedWith:
    """Another key, and the values of it with which this one, or a section, has an effect; so it may where that key is
    left `auto`."""

    key: str
    values: tuple[Any, ...] = (True,)
    because: str = ""
    """Why it has none else, where the value of the other key does not say it."""
    refused: bool = False
    """Whether a value without effect is an error, not a warning."""

    def fits(self, value: Any) -> bool:
        return value == "auto" or value in self.values

    def reason(self, value: Any) -> str:
        """Why it has no effect with this value of the other key."""
        if self.because or len(self.values) > 3:
            return self.because or f"{self.key} is {value}, which does not use it"
        named = [item for item in self.values if isinstance(item, str)]
        return _is(self.key, value) + (f", not {' or '.join(named)}" if named else "")


@dataclass(frozen=True)
class UsedUnless(UsedWith):
    """The values of another key with which this one has no effect."""

    def fits(self, value: Any) -> bool:
        return value not in self.values

    def reason(self, value: Any) -> str:
        return self.because or _is(self.key, value)


def _is(key: str, value: Any) -> str:
    if value is None or (isinstance(value, Sequence) and not isinstance(value, str)):
        return f"{key} is {'given' if value else 'unset'}"
    return f"{key} is {str(value).lower() if isinstance(value, bool) else value}"

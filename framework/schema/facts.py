"""Facts of a key, stated where it is defined: `warmup_steps: Annotated[Count | None, STEERING] = None`.

They determine what a resumed run may change, which keys a comparison of plans skips, which keys are warned about as
having no effect, and what a lever needs to be set in addition. `framework.schema.keys` looks them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Resume(StrEnum):
    """How a resumed run with another value differs."""

    FREE = "free"
    """Not at all: bit for bit the same weights and the same order of rows."""
    ROUNDING = "rounding"
    """Only by rounding: allowed with `--allow`."""
    STEERING = "steering"
    """It trains differently from here on; the checkpoint still loads: allowed with `--allow`."""


@dataclass(frozen=True)
class Facts:
    """Facts of a key, or of all keys of a section."""

    memory: bool = True
    """Whether a plan of device memory may depend on it."""
    resume: Resume | None = None
    """Unset: as its section, else as in the levers table, else another value is refused."""


FREE = Facts(memory=False, resume=Resume.FREE)
STEERING = Facts(memory=False, resume=Resume.STEERING)
NO_MEMORY = Facts(memory=False)


@dataclass(frozen=True)
class UsedWith:
    """Another key and its values with which this key, or section, has an effect; `auto` counts as one of them."""

    key: str
    values: tuple[Any, ...] = (True,)
    because: str = ""
    """Why it has no effect otherwise, if the other key's value does not explain it."""
    refused: bool = False
    """Whether a value without effect is an error instead of a warning."""

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

"""What a rule finds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Conflict:
    """Keys that do not go together, the one to change first, and why."""

    keys: tuple[str, ...]
    message: str
    expected: str | None = None
    is_warning: bool = False

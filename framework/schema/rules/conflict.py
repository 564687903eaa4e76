"""Result of a rule."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Conflict:
    """Contradicting keys, the one to change first, with the reason."""

    keys: tuple[str, ...]
    message: str
    expected: str | None = None
    is_warning: bool = False

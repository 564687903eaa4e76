"""Attributes of other modules, replaced for a while."""

from typing import Any


class Patches:
    """Attributes replaced, and put back in reverse order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)

"""What the schema declares and this version does not do yet. Asking for it is refused: an option that is accepted and
does nothing is the fault this tool exists to end. Whoever builds one deletes its row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from framework.schema.config import TrainingConfig
from framework.schema.keys import Path, dotted, key_at, values


@dataclass(frozen=True)
class Row:
    """A key, the values that work now, and what the others would be."""

    key: str
    works: tuple[Any, ...]
    later: str


ROWS: tuple[Row, ...] = ()
DTYPES = ("model.torch_dtype_str", "peft.adapter_dtype")
"""Keys whose `auto` means the checkpoint's dtype, not a search."""


def unavailable(config: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    """Key, sentence and what works now, for each value that is declared but not built."""
    rows = {row.key: row for row in ROWS}
    for path, value in values(config):
        key, name = dotted(path), ".".join(part for part in path if isinstance(part, str))
        row = rows.get(name)
        if row and value not in row.works and not _is_open(path, value):
            words = [
                str(word).lower() if isinstance(word, bool) else str(word) for word in row.works if word is not None
            ]
            yield key, f"not yet available: {row.later} ({value})", ", ".join(words) or "unset"


def left_open(config: TrainingConfig) -> tuple[str, ...]:
    """The levers that are `auto`: those that a search has to decide before anything is built."""
    return tuple(dotted(path) for path, value in values(config) if _is_open(path, value))


def _is_open(path: Path, value: Any) -> bool:
    return value == "auto" and dotted(path) not in DTYPES and "auto" in getattr(key_at(path), "choices", ())

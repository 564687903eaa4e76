"""A config as YAML with the origin of each value."""

from collections.abc import Iterator, Mapping
from typing import Any

from framework.compose.origins import DEFAULT, Origin
from framework.schema.config import TrainingConfig
from framework.terminal import on_one_line
from framework.text import dump


def to_annotated_yaml(config: TrainingConfig, origins: Mapping[str, Origin]) -> str:
    """The same text with the origin of each value as a comment behind it."""
    return "\n".join(_lines(config.model_dump(), "", origins)) + "\n"


def _lines(value: Any, key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    """The lines of a mapping or list, its scalars as `_dump` writes them."""
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        is_item = isinstance(name, int)
        here = f"{key}[{name}]" if is_item else f"{key}.{name}".removeprefix(".")
        head = "-" if is_item else f"{dump({name: 0}).rpartition(':')[0]}:"
        if not (isinstance(child, dict | list | tuple) and child):
            origin = on_one_line(str(origins.get(here, DEFAULT)))
            yield f"{head} {dump([child]).removeprefix('- ').rstrip()}  # {origin}"
            continue
        inside = [f"  {line}" for line in _lines(child, here, origins)]
        yield from [f"- {inside[0][2:]}", *inside[1:]] if is_item else [head, *inside]

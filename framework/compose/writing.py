"""A config as YAML that the reader turns into an equal config."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from framework.compose.origins import DEFAULT, Origin
from framework.compose.reading import scalar
from framework.schema.config import TrainingConfig


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else, and never breaks a line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf's own escape of a literal `${`
    plain = isinstance(scalar(text), str) and "\n" not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(config: TrainingConfig) -> str:
    """Every key with its value, so that the text trains the same run even under later defaults."""
    return _dump(config.model_dump())


def to_annotated_yaml(config: TrainingConfig, origins: Mapping[str, Origin]) -> str:
    """The same text with the origin of each value as a comment behind it."""
    return "\n".join(_lines(config.model_dump(), "", origins)) + "\n"


def _dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


def _lines(value: Any, key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    """The lines of a mapping or list, its scalars as `_dump` writes them."""
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        is_item = isinstance(name, int)
        here = f"{key}[{name}]" if is_item else f"{key}.{name}".removeprefix(".")
        head = "-" if is_item else f"{_dump({name: 0}).rpartition(':')[0]}:"
        if not (isinstance(child, dict | list | tuple) and child):
            yield f"{head} {_dump([child]).removeprefix('- ').rstrip()}  # {origins.get(here, DEFAULT)}"
            continue
        inside = [f"  {line}" for line in _lines(child, here, origins)]
        yield from [f"- {inside[0][2:]}", *inside[1:]] if is_item else [head, *inside]

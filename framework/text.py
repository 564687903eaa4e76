"""YAML reading and writing: the value of an unquoted word, and a config as text that reads back equal."""

import json
import re
from typing import Any

import yaml

from framework.schema.config import TrainingConfig
from framework.terminal import OBEYED, visible

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]{1,3})?|[0-9]+[eE][-+]?[0-9]{1,3})")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted word. Numbers too large to be exact remain text, which the schema refuses."""
    if text.lower() in _WORDS and text in (text.lower(), text.title(), text.upper()):
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and abs(number := float(text)) != float("inf"):
        return number
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that would otherwise be read as another type, and never breaks a line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # OmegaConf's own escape of a literal `${`
    plain = isinstance(scalar(text), str) and "\n" not in text and not OBEYED.search(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
_FastDumper = type("_FastDumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {"ignore_aliases": lambda *_: True})
"""Four times as fast (PyYAML 6.0.4 with libyaml 0.2.6, a config). It escapes emoji and takes no half of a pair."""
_FastDumper.add_representer(str, _text)  # type: ignore[attr-defined]


def to_yaml(config: TrainingConfig) -> str:
    """Write every key with its value, so that the text describes the same run even if defaults change."""
    return dump(config.model_dump())


def dump(value: Any) -> str:
    """Write one value as YAML on as few lines as it needs, with control characters escaped."""
    is_simple = isinstance(value, dict) and json.dumps(value, ensure_ascii=False).isascii()
    dumper = _FastDumper if is_simple else _Dumper
    return visible(yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=2**20))

"""Entries as a recipe: our sections in order, a section on one line where it fits and has nothing to explain."""

from typing import Any

import yaml

from framework.converters.settle import tree
from framework.converters.translation import Translation
from framework.schema.keys import root
from framework.terminal import on_one_line
from framework.text import dump

WIDTH = 118
EDITED = "training"
"""The section that people change from run to run: a line for each key."""
SECTIONS = ("model", "training", "peft", "fsdp", "data")


def to_recipe(t: Translation, tool: str) -> str:
    """The text, which `tunesmith check` reads."""
    heads = [f"From {t.source.label.rpartition('/')[2]} ({tool})", *t.head]
    lines = [f"# {on_one_line(line)}" for line in heads]
    sections = tree(t)
    if t.preset:
        lines.append(f"defaults: [model: {t.preset}]")
        del sections["model"]["model_name"]
    for name in SECTIONS:
        if inside := sections.get(name):
            order = list(root().children[name].children)
            lines += _section(name, dict(sorted(inside.items(), key=lambda item: order.index(item[0]))), t)
    return "\n".join(lines) + "\n"


def _section(name: str, inside: dict[str, Any], t: Translation) -> list[str]:
    told = {key: t.entries[f"{name}.{key}"].comment for key in inside if f"{name}.{key}" in t.entries}
    told = {key: on_one_line(comment) for key, comment in told.items() if comment}
    block = [f"{name}:", *(line for key, value in inside.items() for line in _lines(key, value, told.get(key, "")))]
    wrapped = _wrapped(name, inside)
    behind = f"{wrapped[0]}  # {next(iter(told.values()), '')}"
    if len(wrapped) == len(told) == 1 and len(behind) <= WIDTH:
        return [behind]
    above = [f"# {name}.{key}: {comment}" for key, comment in told.items()]
    is_short = name != EDITED and len(above) + len(wrapped) <= len(block) / 2
    return [*above, *wrapped] if is_short else block


def _wrapped(name: str, inside: dict[str, Any]) -> list[str]:
    """A section in brackets, on as few lines as it needs."""
    lines = [f"{name}: {{"]
    for key, value in inside.items():
        part = f"{_word(key)}: {_flow(value)}, "
        if len(lines[-1]) + len(part) > WIDTH and lines[-1][-1] != "{":
            lines.append("  ")
        lines[-1] += part
    return [*(line.rstrip() for line in lines[:-1]), f"{lines[-1].removesuffix(', ')}}}"]


def _lines(key: str, value: Any, comment: str) -> list[str]:
    """A key with its value; the items of a long list below it, each on a line."""
    behind = f"  # {comment}" if comment else ""
    line = f"  {key}: {_flow(value)}"
    if isinstance(value, list) and value and isinstance(value[0], dict) and len(line) > WIDTH:
        return [f"  {key}:{behind}", *(f"    - {_flow(item)}" for item in value)]
    if len(line + behind) > WIDTH and comment:
        return [f"  # {comment}", line]
    return [line + behind]


def _flow(value: Any) -> str:
    """A value on one line, lists and mappings in brackets."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return _word(value)


def _word(value: Any) -> str:
    """A scalar as it reads back, also inside brackets."""
    text = dump([value]).removeprefix("- ").rstrip("\n")
    is_plain = not isinstance(value, str) or text.startswith(('"', "'"))
    return (
        text
        if is_plain or not set(text) & set(",[]{}#:&*!|>%@`")
        else yaml.dump(value, default_style='"', width=2**20).strip()
    )

"""Conversion of a file to our YAML: detection of its tool, translation by its tables, and validation by our schema."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.compose.reading import read
from framework.converters import axolotl, litgpt, llamafactory, oumi, torchtune
from framework.converters.settle import settle, tree
from framework.converters.translation import Left, Source, Translation
from framework.errors import Problem, RequestError
from framework.schema.keys import root
from framework.terminal import on_one_line
from framework.text import dump


@dataclass(frozen=True)
class Conversion:
    """Our YAML, and the values of the file that are not in it."""

    tool: str
    recipe: str
    left: tuple[Left, ...]
    carried: Mapping[str, tuple[str, ...]]
    """Key of theirs -> our keys made of it."""
    total: int
    """Values of the file, counting lists of scalars as one."""
    warnings: tuple[str, ...] = ()
    """Remaining problems that `tunesmith check` finds in the recipe."""


@dataclass(frozen=True)
class Tool:
    """A tool, detected by its files' keys."""

    name: str
    is_of: Callable[[Source], bool]
    translate: Callable[[Translation], None]
    sign: str
    """Description of the keys that identify it."""


TOOLS = (
    Tool(
        "torchtune",
        lambda source: any(key.endswith("_component_") for key in source.leaves),
        torchtune.translate,
        "`_component_` in its parts",
    ),
    Tool("Axolotl", lambda source: source.has("base_model"), axolotl.translate, "`base_model`"),
    Tool(
        "LLaMA-Factory", lambda source: source.has("model_name_or_path"), llamafactory.translate, "`model_name_or_path`"
    ),
    Tool(
        "litgpt",
        lambda source: source.has("train.micro_batch_size") or source.has("train.global_batch_size"),
        litgpt.translate,
        "`train.micro_batch_size` or `train.global_batch_size`",
    ),
    Tool(
        "Oumi",
        lambda source: (
            source.has("model.model_name") and any(map(source.has, ("data.train.datasets", "training.trainer_type")))
        ),
        oumi.translate,
        "`model.model_name` next to `data.train.datasets` or `training.trainer_type`",
    ),
)  # fmt: skip
"""Tools, those with the most specific keys first."""
_OTHER_WORK = {
    "tasks": "an evaluation",
    "generation": "inference",
    "engine": "inference",
    "inference_engine": "inference",
}
"""Sections of Oumi's files that train nothing -> what they are for."""


def convert(path: Path) -> Conversion:
    """Convert a recipe of another tool to ours.

    Raises:
        RequestError: for a file that cannot be read, is not a mapping, belongs to no known tool, or is unsupported
            (evaluation, rollouts, images and sound).
    """
    problems: list[Problem] = []
    node = read(path, str(path), "recipe", problems)
    if node is None or problems:
        raise RequestError(problems)
    source = Source(node, str(path))
    tool = _tool_of(source)
    translation = Translation(source)
    tool.translate(translation)
    warnings = settle(translation)
    carried: dict[str, tuple[str, ...]] = {}
    for ours, entry in translation.entries.items():
        for key in entry.of:
            carried[key] = (*carried.get(key, ()), ours)
    recipe = to_recipe(translation, tool.name)
    return Conversion(tool.name, recipe, tuple(translation.left), carried, len(source.leaves), warnings)


def _tool_of(source: Source) -> Tool:
    found = next((tool for tool in TOOLS if tool.is_of(source)), None)
    if found is not None:
        return found
    other = next((name for name in _OTHER_WORK if source.has(name)), None)
    if other and source.has("model"):
        raise source.refuse(other, f"this is a file of Oumi for {_OTHER_WORK[other]}, and trains nothing")
    sections = {key.partition(".")[0].partition("[")[0] for key in source.leaves}
    if sections and sections <= {*root().children, "defaults"}:
        message = "this is a recipe of tunesmith already"
        raise RequestError([Problem("", message, source.label, "nothing to convert: `tunesmith check` reads it")])
    looked = "; ".join(f"{tool.name}: {tool.sign}" for tool in TOOLS)
    message = "this is no training file of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt"
    raise RequestError([Problem("", message, source.label, looked)])


WIDTH = 118
EDITED = "training"
"""The section that changes most often between runs: one line per key."""
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
    comments = {key: t.entries[f"{name}.{key}"].comment for key in inside if f"{name}.{key}" in t.entries}
    comments = {key: on_one_line(comment) for key, comment in comments.items() if comment}
    block = [f"{name}:", *(line for key, value in inside.items() for line in _lines(key, value, comments.get(key, "")))]
    wrapped = _wrapped(name, inside)
    behind = f"{wrapped[0]}  # {next(iter(comments.values()), '')}"
    if len(wrapped) == len(comments) == 1 and len(behind) <= WIDTH:
        return [behind]
    above = [f"# {name}.{key}: {comment}" for key, comment in comments.items()]
    is_short = name != EDITED and len(above) + len(wrapped) <= len(block) / 2
    return [*above, *wrapped] if is_short else block


def _wrapped(name: str, inside: dict[str, Any]) -> list[str]:
    """A section in brackets, on as few lines as possible."""
    lines = [f"{name}: {{"]
    for key, value in inside.items():
        part = f"{_scalar(key)}: {_flow(value)}, "
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
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A scalar as it reads back, also inside brackets."""
    text = dump([value]).removeprefix("- ").rstrip("\n")
    is_plain = not isinstance(value, str) or text.startswith(('"', "'"))
    return (
        text
        if is_plain or not set(text) & set(",[]{}#:&*!|>%@`")
        else yaml.dump(value, default_style='"', width=2**20).strip()
    )

"""Text of composed requests: YAML with origins, differences of two requests, and a recipe with changed values."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.compose.layers import ALTERNATIVES
from framework.compose.origins import DEFAULT, Node, Origin
from framework.compose.overrides import parse
from framework.compose.reading import read
from framework.compose.recipe_files import chosen_presets, find_recipe
from framework.compose.request import Composition, compose
from framework.compose.shipped import editors_line
from framework.errors import Problem, RequestError
from framework.schema.config import SCHEMA_VERSION, TrainingConfig
from framework.schema.keys import dotted, values
from framework.terminal import on_one_line
from framework.text import dump


def to_annotated_yaml(config: TrainingConfig, origins: Mapping[str, Origin]) -> str:
    """The config as YAML, with the origin of each value as a comment."""
    return "\n".join(_lines(config.model_dump(), "", origins)) + "\n"


def _lines(value: Any, key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    """Lines of a mapping or list, with scalars as `dump` writes them."""
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


ABSENT = "(absent)"
"""Value of an item or free key that only the other request has."""


@dataclass(frozen=True)
class Difference:
    """A key with its two values and their origins."""

    key: str
    a: Any
    b: Any
    origin_a: Origin
    origin_b: Origin

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def differences(a: Composition, b: Composition) -> list[Difference]:
    """Keys that differ, in the order of the schema. Lists are compared item by item."""
    ours, theirs = _compared_values(a), _compared_values(b)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        Difference(
            key,
            ours.get(key, ABSENT),
            theirs.get(key, ABSENT),
            a.origins.get(key, DEFAULT),
            b.origins.get(key, DEFAULT),
        )
        for key in keys
        if ours.get(key, ABSENT) != theirs.get(key, ABSENT)
    ]


def _compared_values(composition: Composition) -> dict[str, Any]:
    pairs = ((dotted(path), value) for path, value in values(composition.config))
    return {key: value for key, value in pairs if not (isinstance(value, list | tuple | dict) and value)}


def amended(recipe: str, overrides: Sequence[str], config: TrainingConfig, changes: Sequence[str]) -> str:
    """The recipe's own text with the overrides `words` and then `changes` applied, without the `gpu` section; its first
    line points editors at the schema.

    Comments are lost. If that does not compose to `config`, the text has all values that differ from the defaults; if
    that does not either, all keys.
    """
    head = f"{editors_line()}# {on_one_line(Path(recipe).stem)}, fitted to {config.gpu.name} by `tunesmith fit`.\n"
    whole = {key: value for key, value in config.model_dump().items() if key != "gpu"}
    short = {"schema_version": SCHEMA_VERSION, **_unlike(whole, TrainingConfig().model_dump())}
    texts = (head + dump(document) for document in (_document(recipe, [*overrides, *changes]), short))
    return next((text for text in texts if _composes(text, config)), head + dump(whole))


def _unlike(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The values that differ from the defaults; empty sections are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inside := _unlike(value, default):
                found[key] = inside
        elif value != default or key not in defaults:
            found[key] = value
    return found


def _document(recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    problems: list[Problem] = []
    found = find_recipe(recipe)
    body = read(found.file, found.label, "recipe", problems) or Node({}, DEFAULT)
    typed = parse(overrides, problems)
    tree: dict[str, Any] = body.without(("defaults",)).plain()
    version = tree.pop("schema_version", SCHEMA_VERSION)
    chosen = chosen_presets(found, body, problems) | typed.choices
    groups = [{group: choice.names[0]} for group, choice in chosen.items() if choice is not None and group != "gpu"]
    tree.pop("gpu", None)
    for write in typed.writes:
        if write.path[0] != "gpu":
            _write(tree, [str(part) for part in write.path], write.node.plain() if write.node is not None else None)
    return {"schema_version": version, **({"defaults": groups} if groups else {}), **tree}


def _write(tree: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, name = path
    inner = tree
    for section in sections:
        inner = inner.setdefault(section, {})
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    for (_, mine), (_, other) in ALTERNATIVES:
        if name == mine:
            inner.pop(str(other), None)


def _composes(text: str, config: TrainingConfig) -> bool:
    """Whether the text composes to the config on the same cards."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            composed = compose(file, world=config.gpu.count).config
        except RequestError:
            return False
    same_card = composed.model_copy(update={"gpu": config.gpu})
    return _plain(same_card) == _plain(config)


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """The config as a dict, with a normalized batch."""
    document = config.model_dump()
    batch = config.batch
    document["training"] |= {"gradient_accumulation_steps": batch.accumulation, "global_batch_size": None}
    return document

"""A request with other values as a recipe that composes to them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.compose.layers import ALTERNATIVES
from framework.compose.origins import DEFAULT, Node
from framework.compose.overrides import parse
from framework.compose.reading import read
from framework.compose.recipe_files import chosen_presets, find_recipe
from framework.compose.request import compose
from framework.compose.shipped import editors_line
from framework.errors import Problem, RequestError
from framework.schema.config import SCHEMA_VERSION, TrainingConfig
from framework.terminal import on_one_line
from framework.text import dump


def amended(recipe: str, words: Sequence[str], config: TrainingConfig, changes: Sequence[str]) -> str:
    """The recipe's own text with the `words` of the command line and then `changes` in it, without a machine; on top
    the line by which editors find the schema.

    Comments are lost. Where that does not compose to `config`, the text is what `config` has other than by default, and
    where that does not either, every key.
    """
    said = f"{editors_line()}# {on_one_line(Path(recipe).stem)}, fitted to {config.gpu.name} by `tunesmith fit`.\n"
    whole = {key: value for key, value in config.model_dump().items() if key != "gpu"}
    short = {"schema_version": SCHEMA_VERSION, **_unlike(whole, TrainingConfig().model_dump())}
    texts = (said + dump(document) for document in (_document(recipe, [*words, *changes]), short))
    return next((text for text in texts if _composes(text, config)), said + dump(whole))


def _unlike(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The values that are not the default ones; sections that have none are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inside := _unlike(value, default):
                found[key] = inside
        elif value != default or key not in defaults:
            found[key] = value
    return found


def _document(recipe: str, words: Sequence[str]) -> dict[str, Any]:
    problems: list[Problem] = []
    found = find_recipe(recipe)
    body = read(found.file, found.label, "recipe", problems) or Node({}, DEFAULT)
    typed = parse(words, problems)
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
    """Whether the text, on the same cards, is the config."""
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
    """With the batch said in one way."""
    document = config.model_dump()
    batch = config.batch
    document["training"] |= {"gradient_accumulation_steps": batch.accumulation, "global_batch_size": None}
    return document

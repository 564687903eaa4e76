"""What a recipe says of a model against the config that lies next to its weights, which decides.

A preset's architecture is that of the model that the preset names. With the name of another model above it, or of a
folder, it is dropped in favor of that model's own config; what the recipe's body or the command line write is kept, and
both are listed where they differ.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.compose.layers import Layer, highest
from framework.compose.origins import Node
from framework.errors import Problem
from framework.hub import hub_is_reachable
from framework.paths import read_regular
from framework.schema.architecture import language_part, with_current_names
from framework.schema.keys import Path as Key
from framework.schema.keys import dotted

MODELS: tuple[Key, ...] = (("model",), ("training", "teacher"))
"""Sections that name a model and may hold an architecture."""
CONFIG_FILE = "config.json"
_MOST = 8
"""Differences that a message lists."""


def with_own_configs(layers: list[Layer], warnings: list[Problem]) -> list[Layer]:
    """The layers without what a model's own config decides, with a warning for each model whose values differ."""
    for section in MODELS:
        layers = _with_own_config(layers, section, warnings)
    return layers


def _with_own_config(layers: list[Layer], section: Key, warnings: list[Problem]) -> list[Layer]:
    key = (*section, "architecture")
    name, loads = (highest(layers, (*section, item)) for item in ("model_name", "load_pretrained_weights"))
    trees = [tree for layer in layers if (tree := layer.tree.at(key)) is not None and tree.mapping]
    if name is None or not isinstance(name.value, str) or not trees or (loads is not None and loads.value is False):
        return layers
    presets = [kept for tree in trees if (kept := _only(tree, of_presets=True)) is not None]
    folder = os.path.expanduser(name.value)
    if os.path.isdir(folder):  # False too for a name that no folder can have
        own = _read(Path(folder, CONFIG_FILE))
    elif presets and not any(_file(tree) == _file(name) for tree in presets):
        own = _of_hub_model(name.value, highest(layers, (*section, "model_revision")))
        if own is None:
            message = (
                f"of the preset is taken for {name.value}, whose config.json cannot be read from here: "
                "where the two models differ, what is planned is not what is trained"
            )
            expected = "the preset of that model, or its folder"
            warnings.append(Problem(dotted(key), message, presets[0].origin.place, expected))
    else:
        return layers  # the preset's own model, or an architecture that was written for it
    if own is None:
        return layers
    preset, written = _plain(presets), _plain(kept for tree in trees if (kept := _only(tree, of_presets=False)))
    part = language_part(own)
    is_part = preset.get("model_type", written.get("model_type")) == part.get("model_type") != own.get("model_type")
    own = {**own, **part} if is_part else own
    keeps_type = {"model_type": preset["model_type"]} if is_part and "model_type" in preset else {}
    warnings.extend(_differences(own, preset, written, name, dotted(key)))
    return [replace(layer, tree=_without_presets(layer.tree, key, keeps_type)) for layer in layers]


def _file(node: Node) -> str:
    """The preset that a value stands in."""
    return node.origin.where.rpartition(":")[0] if node.origin.kind == "group" else ""


def _only(node: Node, of_presets: bool) -> Node | None:
    """The part of a tree that presets wrote, or that others did; None where there is nothing of it."""
    if node.mapping is None:
        return node if (node.origin.kind == "group") is of_presets else None
    inside = {name: kept for name, child in node.mapping.items() if (kept := _only(child, of_presets)) is not None}
    return Node(inside, node.origin) if inside else None


def _without_presets(tree: Node, key: Key, kept: Mapping[str, Any]) -> Node:
    architecture = tree.at(key)
    if architecture is None or architecture.mapping is None:
        return tree
    rest = _only(architecture, of_presets=False)
    if kept and architecture.mapping.get("model_type") is not None:
        rest = Node(
            {**(rest.mapping if rest and rest.mapping else {}), "model_type": architecture.mapping["model_type"]},
            architecture.origin,
        )
    return tree.replaced(key, rest) if rest is not None else tree.without(key)


def _plain(trees: Iterator[Node] | Sequence[Node]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tree in trees:
        merged |= tree.plain()
    return merged


def _read(file: Path) -> dict[str, Any] | None:
    """The config in a file; None for one that cannot be read, which is told where the model is."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _of_hub_model(name: str, revision: Node | None) -> dict[str, Any] | None:
    """The config of a hub model, from among what was downloaded before, else from the hub where it can be reached."""
    from huggingface_hub import hf_hub_download

    try:
        wanted = str(revision.value) if revision is not None and revision.value else None
        return _read(Path(hf_hub_download(name, CONFIG_FILE, revision=wanted, local_files_only=not hub_is_reachable())))
    except Exception:  # the hub client raises many kinds, and here all of them say that there is none to be had
        return None


def _differences(
    own: Mapping[str, Any], preset: Mapping[str, Any], written: Mapping[str, Any], name: Node, key: str
) -> Iterator[Problem]:
    """What the model's own config has in place of a preset's values, and what was written in place of its values."""
    values = dict(_values(with_current_names(own)))
    dropped = {item: old for item, old in _values(with_current_names(preset)) if values.get(item, old) != old}
    kept = dict(_values(with_current_names(written)))
    changed = {item: new for item, new in kept.items() if item not in values or values[item] != new}
    changed = {item: new for item, new in changed.items() if not (item.endswith("rope_type") and new == "default")}
    if lost := {item: old for item, old in dropped.items() if item not in kept}:
        shown = _listed(f"{item} {values[item]} (preset {old})" for item, old in lost.items())
        yield Problem(key, f"the config.json of {name.value} decides over the preset: {shown}", name.origin.place)
    if changed:
        shown = _listed(f"{item} {new} for {values.get(item, 'none')}" for item, new in changed.items())
        yield Problem(key, f"is written in place of what the config.json of {name.value} says: {shown}")


def _values(settings: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", [*value] if isinstance(value, tuple) else value


def _listed(items: Iterator[str]) -> str:
    found = [*items]
    return ", ".join(found[:_MOST]) + (f" and {len(found) - _MOST} more" if len(found) > _MOST else "")

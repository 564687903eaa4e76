"""A model's own config in place of a preset's architecture.

A preset's architecture belongs to the model that it names. If another model or a folder is named instead, the
architecture is dropped in favor of that model's own config. Values of the recipe's body and the command line are kept;
differences are listed as warnings.
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
"""Maximum number of differences in a message."""


def with_own_configs(layers: list[Layer], warnings: list[Problem]) -> list[Layer]:
    """The layers without values that a model's own config determines, with a warning for each model that differs."""
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
    if os.path.isdir(folder):  # False also for names that no folder can have
        own = _read(Path(folder, CONFIG_FILE))
    elif presets and not any(_file(tree) == _file(name) for tree in presets):
        own = _of_hub_model(name.value, highest(layers, (*section, "model_revision")))
        if own is None:
            message = (
                f"of the preset is used for {name.value}, whose config.json cannot be read from here: "
                "if the two models differ, the plan does not match the training"
            )
            expected = "the preset of that model, or its folder"
            warnings.append(Problem(dotted(key), message, presets[0].origin.place, expected))
    else:
        return layers  # the preset's own model, or a written architecture
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
    """File of the preset that a value comes from."""
    return node.origin.where.rpartition(":")[0] if node.origin.kind == "group" else ""


def _only(node: Node, of_presets: bool) -> Node | None:
    """The part of a tree that presets wrote, or that others did; None if empty."""
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
    """The config in a file; None if it cannot be read, which is reported when the model is read."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _of_hub_model(name: str, revision: Node | None) -> dict[str, Any] | None:
    """The config of a hub model, from the cache or the hub; None if neither has it."""
    from huggingface_hub import hf_hub_download

    try:
        wanted = str(revision.value) if revision is not None and revision.value else None
        return _read(Path(hf_hub_download(name, CONFIG_FILE, revision=wanted, local_files_only=not hub_is_reachable())))
    except Exception:  # the hub client raises many types, which all mean that it is not available
        return None


def _differences(
    own: Mapping[str, Any], preset: Mapping[str, Any], written: Mapping[str, Any], name: Node, key: str
) -> Iterator[Problem]:
    """Warnings about preset values that the model's config replaces, and about written values that replace the
    config's."""
    values = dict(_values(with_current_names(own)))
    dropped = {item: old for item, old in _values(with_current_names(preset)) if values.get(item, old) != old}
    kept = dict(_values(with_current_names(written)))
    changed = {item: new for item, new in kept.items() if item not in values or values[item] != new}
    changed = {item: new for item, new in changed.items() if not (item.endswith("rope_type") and new == "default")}
    if lost := {item: old for item, old in dropped.items() if item not in kept}:
        shown = _listed(f"{item} {values[item]} (preset {old})" for item, old in lost.items())
        yield Problem(key, f"the config.json of {name.value} overrides the preset: {shown}", name.origin.place)
    if changed:
        shown = _listed(f"{item} {new} for {values.get(item, 'none')}" for item, new in changed.items())
        yield Problem(key, f"overrides the config.json of {name.value}: {shown}")


def _values(settings: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", [*value] if isinstance(value, tuple) else value


def _listed(items: Iterator[str]) -> str:
    found = [*items]
    return ", ".join(found[:_MOST]) + (f" and {len(found) - _MOST} more" if len(found) > _MOST else "")

"""Lookup of a recipe's file, and the presets chosen by its `defaults:`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as File

from framework.compose import shipped
from framework.compose.origins import Node, Origin
from framework.compose.overrides import Choice
from framework.compose.paths import exists
from framework.errors import Problem, RequestError
from framework.paths import path_like

YAML_SUFFIXES = (".yaml", ".yml")
_OF_MODELS = ("config.json", "adapter_config.json")
SELF = "_self_"
"""Hydra's entry for the position of the recipe's own keys among its defaults."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's file."""

    name: str
    """The typed name of a shipped recipe, else the file's name without its ending."""
    file: File
    label: str
    """Name of the file in messages."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Group -> preset in place of the file's own choice, for an earlier name of a shipped recipe."""
    folders: tuple[File, ...] = ()
    """Folders of the user's own presets: `conf` next to the recipe."""
    renamed: Problem | None = None
    """Warning about an earlier name."""


def find_recipe(recipe: str | File) -> RecipeFile:
    """Find a recipe by path, or by the name of a shipped one. Raises RequestError if there is none."""
    typed = str(recipe)
    path = File(os.path.expanduser(typed))
    is_path = isinstance(recipe, File) or path.suffix in YAML_SUFFIXES or ("/" in typed and exists(typed))
    known = shipped.recipes()
    here = (File(shipped.PRESETS),)  # as for the user's own recipes
    if not is_path and typed in known:
        return RecipeFile(typed, known[typed], f"recipes/{typed}.yaml", folders=here)
    if not is_path and (old := shipped.EARLIER_RECIPES.get(typed)) is not None:
        message = f"`{typed}` is now `{old.typed}`; the earlier name is removed in version {shipped.EARLIER_UNTIL}"
        renamed = Problem("", message)
        return RecipeFile(typed, known[old.recipe], f"recipes/{old.recipe}.yaml", old.choices, here, renamed)
    if typed and exists(typed) and (path.is_dir() or path.name in _OF_MODELS):
        raise RequestError([_no_recipe(typed, path)])
    if is_path and exists(typed):
        return RecipeFile(path.stem, path, typed, folders=(path.parent / shipped.PRESETS,))
    is_path = is_path or "/" in typed
    file = f"{typed}.yaml" if exists(f"{typed}.yaml") else file_like(typed) if is_path else None
    nearest = file or shipped.nearest(path.stem if is_path else typed, known)
    message = f"no such file: {typed} ({path.absolute()})" if is_path else f"no recipe is called {typed!r}"
    raise RequestError([Problem("", message, None, f"a path, or one of: {', '.join(known)}", nearest)])


def _no_recipe(typed: str, path: File) -> Problem:
    """Problem for a folder or a model's config given as a recipe, with what to type instead."""
    folder = path if path.is_dir() else path.parent
    written = typed if path.is_dir() else os.path.dirname(typed) or "."
    of_run, sibling = os.path.join(written, "config.yaml"), f"{typed.rstrip('/')}.yaml"
    if exists(of_run) or exists(sibling):
        nearest = sibling if exists(sibling) else of_run
        return Problem("", f"{typed} is a folder, not a recipe", None, "a YAML file", nearest)
    if (folder / _OF_MODELS[0]).is_file():
        message = f"{typed} is {'the folder' if path.is_dir() else 'the config'} of a model, not a recipe"
        expected = f"a recipe with `model: {{model_name: {written}}}`, or a shipped one with it"
        return Problem("", message, None, expected, f"finetune_local model.model_name={written}")
    inside = path_like(os.path.join(written, "recipe.yaml"), lambda file: file.suffix in YAML_SUFFIXES)
    return Problem("", f"{typed} is a folder, not a recipe", None, "a YAML file, or the name of a recipe", inside)


def file_like(written: str) -> str | None:
    """The existing YAML file with the most similar path."""
    return path_like(written, lambda file: file.suffix in YAML_SUFFIXES and file.is_file(), YAML_SUFFIXES)


def chosen_presets(recipe: RecipeFile, body: Node, problems: list[Problem]) -> dict[str, Choice | None]:
    """Group -> preset chosen by a recipe; None for an explicit null.

    `defaults:` is a list of `group: preset`. A final `_self_`, `override` and `/group` mean the same as in Hydra; other
    Hydra syntax is a problem with what to write instead.
    """
    node = body.at(("defaults",))
    choices: dict[str, Choice | None] = {}
    if node is not None and node.value is not None:
        if node.sequence is None:
            expected = f"a list of `- group: preset`; groups are {', '.join(shipped.GROUPS)}"
            problems.append(Problem("defaults", "is not a list", node.origin.place, expected))
        for index, item in enumerate(node.sequence or ()):
            if problem := _choose(item, index, len(node.sequence or ()), choices):
                problems.append(problem)
    origin = Origin("recipe", recipe.label)
    return choices | {group: Choice((name,), origin) for group, name in recipe.choices.items()}


def _choose(item: Node, index: int, count: int, choices: dict[str, Choice | None]) -> Problem | None:
    """Add the choice of one item, or return a problem."""
    key, place = f"defaults[{index}]", item.origin.place
    if item.value == SELF:
        expected = "leave it out, or put it last; the command line is above both"
        message = "presets apply before the recipe's own keys"
        return Problem(key, f"`{SELF}`: {message}", place, expected) if index + 1 < count else None
    [(written, choice)] = item.mapping.items() if item.mapping and len(item.mapping) == 1 else [("", item)]
    *markers, name = written.split() or [""]
    group, _, package = name.removeprefix("/").partition("@")
    names = [part.value for part in choice.sequence] if choice.sequence is not None else [choice.value]
    are_names = names == [None] or all(isinstance(name, str | int | float) for name in names)
    if group not in shipped.GROUPS or not are_names or set(markers) - {"override", "optional"}:
        expected = f"a list of `- group: preset`; groups are {', '.join(shipped.GROUPS)}"
        nearest = shipped.nearest(group, shipped.GROUPS)
        return Problem(key, "is not a preset of a group", place, expected, nearest)
    if package:
        return Problem(key, "presets have no package: they name the sections that they set", place, f"`{group}:`")
    if group in choices and "override" not in markers:
        return Problem(key, f"`{group}` is chosen twice", place, "one choice of a group")
    is_optional = "optional" in markers
    choices[group] = None if names == [None] else Choice(tuple(map(str, names)), choice.origin, is_optional)
    return None

"""Overrides on the command line, parsed by Hydra's override grammar."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path as File

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from framework.compose.origins import Node, Origin, node_of
from framework.compose.shipped import GROUPS
from framework.errors import Problem, RequestError
from framework.paths import path_like
from framework.schema.keys import Path, dotted, key_at, keys_next_to, unknown

COMMAND_LINE = "command line"
FOLDER = "config_dir"
"""Override that names a folder of presets."""
MAX_OVERRIDE = 8192
"""Maximum characters of an override: Hydra's parser takes up to 0.1 ms per character."""


@dataclass(frozen=True)
class Choice:
    """`group=choice`. A list means one machine with different cards."""

    names: tuple[str, ...]
    origin: Origin
    is_optional: bool = False
    """Whether a missing preset is ignored."""


@dataclass(frozen=True)
class Write:
    """`key=value`, `key+=[value]` (the node is then `{append: [value]}`), or `~key` (no node)."""

    path: Path
    node: Node | None


@dataclass(frozen=True)
class ParsedOverrides:
    """Parsed overrides of the command line."""

    choices: dict[str, Choice | None]
    """None: the recipe's choice of that group is dropped."""
    writes: list[Write]
    replaced: list[Problem]
    """Warnings about overrides that a later one replaces."""
    folders: tuple[File, ...] = ()
    """Folders of presets of the user's own (`config_dir=`)."""


def parse(overrides: Sequence[str], problems: list[Problem]) -> ParsedOverrides:
    """Parse group choices and writes, in the order typed, with a problem for each invalid override and each second
    choice of a group. `config_dir=DIR` names a folder of presets.

    `+key=` and `++key=` mean `key=`. Hydra's own namespace is refused, and so is a list of values, which is a sweep,
    except that `gpu=a,b` names different cards of one machine.
    """
    choices: dict[str, Choice | None] = {}
    writes: list[Write] = []
    typed: dict[str, str] = {}
    replaced: list[Problem] = []
    folders = tuple(_folders(overrides, problems))
    overrides = [override for override in overrides if not names_folder(override)]
    for override, following in zip_longest(overrides, overrides[1:], fillvalue=""):
        key, equals, raw = override.strip().partition("=")
        key, appends = (key[:-1], True) if key.endswith("+") else (key, False)
        deletes = key.startswith("~")
        path = path_of(key.lstrip("+~"))
        problem = fault(override, path, bool(equals), deletes, following)
        value: object = None
        if not problem and not deletes:
            value, problem = _value(path, raw, override)
        if problem:
            problems.append(problem)
            continue
        group, origin = group_of(path), Origin("command line", override)
        if deletes:
            writes.append(Write(path, None))
        if group:
            names = value if isinstance(value, tuple) else (str(value),)
            chosen = None if deletes else Choice(names, origin)
            if choices.setdefault(group, chosen) != chosen:
                message = f"is chosen twice, by `{typed[group]}` and by `{_shown(override)}`"
                problems.append(Problem(group, message, COMMAND_LINE, "one choice of a group"))
        elif not deletes:
            writes.append(Write(path, node_of({"append": value} if appends else value, origin)))
        earlier = typed.setdefault(dotted(path), _shown(override))
        if not (group or appends) and earlier != _shown(override):
            message = f"`{earlier}` has no effect: `{_shown(override)}` comes after it"
            replaced.append(Problem(dotted(path), message, COMMAND_LINE))
            typed[dotted(path)] = _shown(override)
    return ParsedOverrides(choices, writes, replaced, folders)


def listed(overrides: Sequence[str], takes_cards: bool) -> tuple[str, dict[str, list[str]]] | None:
    """The key with a list of values, and for each value the overrides with only that value; None if there is no list.

    `gpu=a,b` is one machine, unless `takes_cards` makes it a list too. Raises RequestError for two such keys.
    """
    found: dict[int, list[str]] = {}
    for place, override in enumerate(overrides):
        key, _, raw = override.strip().partition("=")
        try:
            parsed = (
                OverridesParser.create().parse_override(f"key={raw}") if raw and len(override) <= MAX_OVERRIDE else None
            )
            is_list = parsed is not None and parsed.is_sweep_override() and not names_folder(override)
            if parsed is not None and is_list and (takes_cards or key != "gpu"):
                found[place] = list(parsed.sweep_string_iterator())
        except (HydraException, ValueError, RecursionError):  # reported when composing
            continue
    first, *others = found or [-1]
    if others:
        expected = "a list for one key; `train -m` runs all combinations of several"
        raise RequestError(
            [Problem(_shown(overrides[at]), "is a second list", COMMAND_LINE, expected) for at in others]
        )
    if not found:
        return None
    key = overrides[first].strip().partition("=")[0]
    return key, {value: [*overrides[:first], f"{key}={value}", *overrides[first + 1 :]] for value in found[first]}


def group_of(path: Path) -> str | None:
    """The group of an override without a dot, if it is one."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) and path[0] in GROUPS else None


def path_of(key: str) -> Path:
    """The path of a key; `data.train[0].path` and `data.train.0.path` are the same."""
    parts = re.sub(r"\[(\d{1,4})\]", r".\1", key).split(".")
    return tuple(int(part) if re.fullmatch(r"\d{1,4}", part) else part for part in parts)


def fault(override: str, path: Path, has_value: bool, deletes: bool, following: str = "") -> Problem | None:
    """Problem of an override other than its value. `following` is the next argument."""
    shown = _shown(override)
    name = str(path[0])
    if name == "hydra" or name.startswith(("hydra/", "hydra:", "hydra@")):
        message = "Hydra's own settings cannot be set"
        return Problem(shown, message, COMMAND_LINE, "only launcher and sweeper settings, with -m")
    if len(override) > MAX_OVERRIDE:
        return Problem(shown, f"is longer than {MAX_OVERRIDE} characters: write it in a file", COMMAND_LINE)
    if group_of(path) is None and key_at(path) is None:
        message, nearest = unknown(path)
        expected = None if nearest else keys_next_to(path)
        if path == ("",) or not (has_value or nearest or deletes):
            message, expected = f"`{shown}` is not `key=value`", "`key=value`, without spaces around the `=`"
        return Problem(shown.partition("=")[0], message, COMMAND_LINE, expected, nearest)
    if not has_value and not deletes:
        value = following.lstrip("=")
        is_value = value and "=" not in value and key_at(path_of(value)) is None
        expected = f"`{shown}=value`, without spaces around the `=`"
        return Problem(shown, "the `=` is missing", COMMAND_LINE, expected, f"{shown}={value}" if is_value else None)
    if deletes and isinstance(path[-1], int):
        return Problem(shown, "`~` takes a key, not one item of a list", COMMAND_LINE, f"`~{dotted(path[:-1])}`")
    if has_value and deletes:
        return Problem(shown, "`~` resets a key to its default and takes no value", COMMAND_LINE, f"`~{dotted(path)}`")
    return None


def _value(path: Path, raw: str, override: str) -> tuple[object, Problem | None]:
    """The value after `=`; for `gpu=a,b` a tuple of names."""
    shown = _shown(override)
    try:
        parsed = OverridesParser.create().parse_override(f"key={raw}")
        value = parsed.value()
        is_list_of_cards = path == ("gpu",) and parsed.value_type == ValueType.SIMPLE_CHOICE_SWEEP
        names = tuple(parsed.sweep_string_iterator()) if is_list_of_cards else ()
    except (HydraException, ValueError, RecursionError) as error:
        parts = [part.strip() for part in raw.split(",")]
        if "" in parts and not set("[{(\"'") & set(raw):
            fixed = ",".join(filter(None, parts))
            nearest = f"{override.partition('=')[0]}={fixed}" if fixed else None
            return None, Problem(shown, "a value is missing before or after a comma", COMMAND_LINE, None, nearest)
        detail = str(error).partition("\n")[0][:80]
        expected = "special characters in quotes that the shell does not remove: key='\"a=b\"'"
        nearest = (
            f"""{override.partition("=")[0]}='"{raw}"'""" if not set("'\"\\[{(") & set(raw) and len(raw) < 80 else None
        )
        return None, Problem(shown, f"the value cannot be read: {detail}", COMMAND_LINE, expected, nearest)
    if names:
        return names, None
    if parsed.is_sweep_override():
        message, expected = "several values are a sweep, which needs -m", "one value, or a list `[a,b]`"
        return None, Problem(shown, message, COMMAND_LINE, expected)
    if (group := group_of(path)) and not isinstance(value, str | int | float):
        message = f"`{group}=` chooses a preset; a section cannot be set as a whole"
        expected = f"`{group}=preset`, or one key at a time: `{group}.key=value`"
        return None, Problem(shown, message, COMMAND_LINE, expected)
    return value, None


def _folders(overrides: Sequence[str], problems: list[Problem]) -> Iterator[File]:
    """Folders of presets, with a problem for each that does not exist."""
    for written in (override.partition("=")[2].strip() for override in overrides if names_folder(override)):
        folder = File(os.path.expanduser(written))
        if written and folder.is_dir():
            yield folder
        else:
            message = f"no such folder: {written} ({folder.absolute()})" if written else "names no folder"
            near = path_like(written, File.is_dir) if written else None
            expected = "a folder with folders of presets, as gpu/mycard.yaml"
            problems.append(Problem(FOLDER, message, COMMAND_LINE, expected, near))


def names_folder(override: str) -> bool:
    """Whether the override is `config_dir=DIR`, where a comma is part of the name."""
    return override.strip().startswith(f"{FOLDER}=")


def _shown(override: str) -> str:
    return override if len(override) < 80 else override[:77] + "..."

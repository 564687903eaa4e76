"""Arguments and options common to several commands, and their shell completion. Loads no torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

Offer = tuple[str, str]
"""A completion and its description."""
_LONGEST = 48
"""Most characters of a description; longer ones would be wrapped, which zsh shows."""


def complete_recipe(incomplete: str) -> list[Offer]:
    """Complete shipped recipes and YAML files."""
    from framework.compose import shipped

    named = [(name, _purpose(path)) for name, path in shipped.recipes().items()]
    return [offer for offer in [*named, *_files(incomplete)] if offer[0].startswith(incomplete)]


def complete_overrides(context: typer.Context, incomplete: str) -> list[Offer]:
    """Complete `group=preset` and `section.key=value`: matching keys, and the values of a complete one.

    bash splits words at `=`, so there values are offered alone.
    """
    before = [str(word) for word in context.params.get("overrides") or ()]
    if before[-1:] == ["="] and len(before) > 1:
        return [(value, purpose) for value, purpose in _values(before[-2]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    keys = [key] if equals else [name for name in _keys(incomplete) if name.startswith(incomplete)]
    if len(keys) > 1 or (keys and keys[0].endswith(".")):
        return [(name if name.endswith(".") else f"{name}=", "") for name in keys]
    found = [(f"{key}={value}", purpose) for key in keys for value, purpose in _values(key)]
    bare = [(f"{key}=", "") for key in keys if not equals]
    return [offer for offer in [*bare, *found] if offer[0].startswith(incomplete)]


def override_values(key: str) -> Callable[[str], list[Offer]]:
    """Completion function for the values of one group or key, without its name."""

    def offered(incomplete: str) -> list[Offer]:
        return [(value, purpose) for value, purpose in _values(key) if value.startswith(incomplete)]

    return offered


def _purpose(file: Path) -> str:
    from framework.compose.shipped import purpose

    return shorten(purpose(file), _LONGEST, placeholder="..")


def _files(incomplete: str) -> Iterator[Offer]:
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in (".yaml", ".yml"):
            yield str(path), "a file"
        elif path.is_dir() and not path.name.startswith("."):
            yield f"{path}/", "a folder"


def _keys(incomplete: str) -> list[str]:
    """Groups and sections; after a section's dot its keys."""
    from framework.compose.shipped import GROUPS
    from framework.schema.keys import every_key, key_at, root

    if "." in incomplete:
        return [key for key in every_key() if "." in key and not getattr(key_at(tuple(key.split("."))), "children", ())]
    return [*GROUPS, *(f"{name}." for name, key in root().children.items() if key.children)]


def _values(key: str) -> Iterator[Offer]:
    """The presets of a group, or the values of a key; for a number its default."""
    from framework.compose import shipped
    from framework.compose.overrides import path_of
    from framework.schema.config import TrainingConfig
    from framework.schema.keys import key_at, values

    if key in shipped.GROUPS:
        presets = shipped.presets(key, (Path(shipped.PRESETS),))
        yield from ((name, _purpose(preset.file)) for name, preset in presets.items())
        return
    found = key_at(path_of(key))
    if found is None or found.children:
        return
    switch = ("true", "false") if "true or false" in found.expected else ()
    default = dict(values(TrainingConfig())).get(path_of(key))
    written = () if default is None or found.choices or switch else (str(default),)
    yield from ((value, "") for value in (*switch, *found.choices, *written))


Recipe = Annotated[
    str,
    typer.Argument(help="A path to a YAML file, or the name of a shipped recipe.", autocompletion=complete_recipe),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="group=preset, section.key=value, section.list+=[item], ~section.key",
        show_default=False,
        autocompletion=complete_overrides,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model; a run's config cannot say so."
    ),
]
Processes = Annotated[int | None, typer.Option("--nproc", min=1, help="Number of processes; sets gpu.count.")]
AllowBase = Annotated[
    list[str] | None,
    typer.Option("--allow", help="model.base: the adapter's base may have changed since it was trained."),
]

"""Lookup of a recipe's keys, their facts and accepted values, and suggestions for unknown keys.

Derived from the JSON Schema of `TrainingConfig`, so a new field needs nothing here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from framework.schema.adapters import ADAPTERS, AdapterFacts
from framework.schema.config import SCHEMA_VERSION, TrainingConfig
from framework.schema.facts import Facts, Resume, UsedWith
from framework.schema.optimizers import FACTS, OptimizerFacts
from framework.schema.params import Auto
from framework.schema.renamed import OLD_NAMES

Path = tuple[str | int, ...]
"""Path of a value: names of mappings and indices of lists, from the root."""

MOST_LISTED = 25
"""Maximum number of keys that a message lists; `training` has three times as many."""

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""pydantic's name of a bound -> its text in messages."""


@dataclass(frozen=True)
class Key:
    """What a path accepts. A list of sections has the children of one item."""

    children: Mapping[str, "Key"] = field(default_factory=dict)
    is_list: bool = False
    is_free: bool = False
    """A mapping with arbitrary keys."""
    choices: tuple[str, ...] = ()
    expected: str = ""


def dotted(path: Path) -> str:
    """`("data", "train", 0, "path")` -> `data.train[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def up_to_list(path: Path) -> Path:
    """The path up to its first list index: the innermost key that a file can leave out."""
    return next((path[:index] for index, part in enumerate(path) if isinstance(part, int)), path)


@cache
def root() -> Key:
    """The tree of all keys."""
    schema = TrainingConfig.model_json_schema()
    return _key(schema, schema["$defs"])


def key_at(path: Path) -> Key | None:
    """The key at `path`, or None if the schema has none. Below a free mapping everything is accepted."""
    key = root()
    for part in path:
        if key.is_free or (key.is_list and isinstance(part, int)):
            continue
        if not isinstance(part, str) or part not in key.children:
            return None
        key = key.children[part]
    return key


@cache
def every_key() -> tuple[str, ...]:
    """All keys, dotted and without list indices, in the order of the schema."""
    return tuple(_walk(root(), ""))


def moves_memory(key: str) -> bool:
    """Whether the planned device memory may depend on a key."""
    return all(item.memory for item in _stated(key) if isinstance(item, Facts))


def resume_of(key: str) -> Resume | None:
    """The fact about resuming with another value, of the key itself or else of its section."""
    found = [item.resume for item in _stated(key) if isinstance(item, Facts) and item.resume is not None]
    return found[-1] if found else None


@cache
def uses_of(key: str) -> tuple[UsedWith, ...]:
    """Conditions on other keys under which a key has an effect, those of its section first."""
    section, _, name = key.rpartition(".")
    own = (item for item in _stated(key) if isinstance(item, UsedWith))
    rows: Mapping[str, tuple[str, Mapping[Any, OptimizerFacts | AdapterFacts]]]
    rows = {"training": ("training.optimizer", FACTS), "peft": ("peft.peft_method", ADAPTERS)}
    cause, facts_of = rows.get(section, ("", {}))
    users = tuple(choice for choice, facts in facts_of.items() if name in facts.keys)
    return (*own, *([UsedWith(cause, users)] if users else []))


def left_open(config: TrainingConfig) -> tuple[str, ...]:
    """Levers that are `auto`, which a search has to decide before anything is built."""
    return tuple(dotted(path) for path, value in values(config) if value == "auto" and admits_auto(dotted(path)))


@cache
def admits_auto(key: str) -> bool:
    """Whether `auto` asks for a search there, and is not a value of its own, as for a dtype."""
    definitions = _definitions(key)
    return len(definitions) == key.count(".") + 1 and Auto in get_args(definitions[-1].annotation) and "[" not in key


def _stated(key: str) -> Iterator[Any]:
    """Annotations of a key and its sections, outermost first."""
    return (item for definition in _definitions(key) for item in definition.metadata)


@cache
def _definitions(key: str) -> tuple[FieldInfo, ...]:
    """The fields that lead to a key, down to a free mapping."""
    section: type[BaseModel] | None = TrainingConfig
    found = list[FieldInfo]()
    for part in key.split("."):
        definition = section.model_fields.get(part.partition("[")[0]) if section else None
        if definition is None:
            break
        found.append(definition)
        section = _section_in(definition.annotation)
    return tuple(found)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def value_of(config: TrainingConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def values(config: TrainingConfig) -> Iterator[tuple[Path, Any]]:
    """All values of a config except mappings; lists as a whole and item by item."""
    found: list[tuple[Path, Any]] = []
    _collect(config.model_dump().items(), (), found)
    return iter(found)


def written_keys(section: BaseModel, inside: str = "") -> Iterator[str]:
    """Dotted keys that were set explicitly, also to a default; lists as a whole."""
    for name in sorted(section.model_fields_set):
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from written_keys(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}"


def changed_keys(section: BaseModel, usual: object, inside: str = "") -> Iterator[str]:
    """Dotted keys whose values are not those of `usual`, a section or None; lists and free mappings as a whole."""
    for name in type(section).model_fields:
        value, other = getattr(section, name), getattr(usual, name, None)
        if isinstance(value, BaseModel):
            yield from changed_keys(value, other, f"{inside}{name}.")
        elif usual is None or value != other:
            yield f"{inside}{name}"


def unknown(path: Path) -> tuple[str, str | None]:
    """Message for an unknown key, and the key that was probably intended."""
    names = [str(part).replace("-", "_") for part in path if isinstance(part, str)]
    written, spelled = dotted(path), ".".join(names)
    if not spelled:
        return f"there is no key `{written}`", None
    if spelled in every_key():
        if "-" in written:
            return "keys are written with underscores, not hyphens", spelled
        is_dotted = any("." in str(part) for part in path)
        return (
            "in a file keys are nested below their section, without a dot" if is_dotted else "is not a list",
            spelled,
        )
    old = OLD_NAMES.get(spelled) or OLD_NAMES.get(names[-1])
    if old and old.removed_in:
        return f"removed in schema version {old.removed_in}, use {old.use}", old.use
    if old:
        instead = f"use {old.use} ({old.how})" if old.use and old.how else f"use {old.use}" if old.use else old.how
        return f"is not a key of schema version {SCHEMA_VERSION}{', ' if old.use else ': '}{instead}", old.use
    elsewhere = [key for key in every_key() if key.rpartition(".")[2] == names[-1]]
    nearest = max(elsewhere, key=lambda key: SequenceMatcher(None, key, spelled).ratio(), default=None)
    if nearest and (len(names) == 1 or names[0] in root().children):
        return f"there is no key `{written}`; it belongs to section `{nearest.rpartition('.')[0]}`", nearest
    return f"there is no key `{written}`", nearest or _most_alike(names)


def keys_next_to(path: Path) -> str | None:
    """Text with the accepted keys at the place of an unknown one; None below an unknown section."""
    section = tuple(part for part in path[:-1] if isinstance(part, str))
    key = None if path[-1] in OLD_NAMES else key_at(section)
    if key is None or not key.children:
        return None
    if len(key.children) > MOST_LISTED:
        return f"a key of `{dotted(section)}`: `tunesmith show RECIPE --origin` lists them"
    return f"one of: {', '.join(key.children)}"


def _most_alike(names: list[str]) -> str | None:
    """A similar key: a sibling; a key of another section with nearly the same name; for an unknown section any key that
    is similar as a whole or in its last part."""
    section = ".".join(names[:-1])
    deep = [key for key in every_key() if key != section and ("." in key or len(names) == 1)]
    by_name = {key.rpartition(".")[2]: key for key in reversed(deep)}
    siblings = {key.rpartition(".")[2]: key for key in deep if key.rpartition(".")[0] == section}
    attempts = [(siblings, names[-1], 0.6)]
    if section in every_key():  # otherwise the section's name would make all its keys similar
        attempts += [(by_name, names[-1], 0.85)]
    else:
        attempts += [({key: key for key in deep}, ".".join(names), 0.75), (by_name, names[-1], 0.7)]
    for candidates, word, cutoff in attempts:
        if close := get_close_matches(word, candidates, 1, cutoff):
            return candidates[close[0]]
    return None


def _walk(key: Key, prefix: str) -> Iterator[str]:
    for name, child in key.children.items():
        yield prefix + name
        yield from _walk(child, f"{prefix}{name}.")


def _collect(items: Iterable[tuple[Any, Any]], path: Path, found: list[tuple[Path, Any]]) -> None:
    """Append the values within one. A search reads a thousand configs; nested generators, or a call per value, would be
    three times slower."""
    for name, value in items:
        here = (*path, name)
        if isinstance(value, dict) and value:
            _collect(value.items(), here, found)
            continue
        found.append((here, value))
        if isinstance(value, (list, tuple)):
            _collect(enumerate(value), here, found)


def _key(fragment: Mapping[str, Any], definitions: Mapping[str, Any]) -> Key:
    branches = list(_branches(fragment, definitions))
    children: dict[str, Key] = {}
    for branch in branches:
        is_list = branch.get("type") == "array"
        for mapping in _branches(branch["items"], definitions) if is_list else [branch]:
            properties = mapping.get("properties", {})
            children |= {name: _key(child, definitions) for name, child in properties.items()}
    return Key(
        children=children,
        is_list=any(branch.get("type") == "array" for branch in branches),
        is_free=any(branch.get("additionalProperties") is True for branch in branches),
        choices=tuple(word for branch in branches for word in branch.get("enum", [branch.get("const")]) if word),
        expected=", or ".join(text for branch in branches if (text := _describe(branch, definitions))),
    )


def _branches(fragment: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a fragment, with references resolved."""
    if "$ref" in fragment:
        fragment = definitions[fragment["$ref"].rpartition("/")[2]]
    if "anyOf" not in fragment:
        yield fragment
    for branch in fragment.get("anyOf", ()):
        yield from _branches(branch, definitions)


def _describe(branch: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "enum" in branch:
        return f"one of: {', '.join(branch['enum'])}"
    if "const" in branch:
        return f"`{branch['const']}`"
    kind = branch.get("type")
    if kind == "array":
        items = " or ".join(_describe(item, definitions) for item in _branches(branch["items"], definitions))
        return f"a list, each item {items}"
    if kind == "string" and "pattern" in branch:
        return f"text (quoted) that matches {branch['pattern']}"
    if {"multiple_of", "ge", "le"} <= branch.keys():
        return f"one of: {', '.join(map(str, range(branch['ge'], branch['le'] + 1, branch['multiple_of'])))}"
    names = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    names |= {"object": "a mapping"}
    bounds = "".join(f", {word} {branch[bound]:g}" for bound, word in BOUNDS.items() if bound in branch)
    return names.get(str(kind), "") + bounds

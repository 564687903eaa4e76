"""`${section.key}` references in values, which may refer only to a key with a scalar value.

OmegaConf parses and resolves them; this module refuses others before. Resolvers could read the environment or call
code, and references to sections and long chains could let a small file grow without bound.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from antlr4 import ParserRuleContext
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

MAX_TEXT = 8192
"""Maximum characters of all texts with references together: OmegaConf's parser takes 0.1 ms per character."""
MAX_RESULT = 65536
"""Maximum characters of a resolved text."""


def fault(value: object, room: int) -> str | None:
    """Why a written value is invalid by itself, or None. `room` is the rest of MAX_TEXT."""
    if value == "???":
        return "`???` is a placeholder: write a value"
    if not isinstance(value, str) or "${" not in value:
        return None
    if len(value) > room:
        return f"texts that refer to keys with `${{..}}` are limited to {MAX_TEXT} characters in all"
    try:
        _references(value)
    except ValueError as error:
        return str(error)
    return None


def over(low: Any, high: Any) -> Any:
    """The higher values merged over the lower ones, mapping by mapping, as Hydra merges a defaults list; references are
    left as they are."""
    if not (isinstance(low, Mapping) and isinstance(high, Mapping)):
        return high
    return {**low, **{name: over(low.get(name), value) for name, value in high.items()}}


def resolve(whole: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """`written` with each reference replaced by its value in `whole`."""
    resolved: dict[str, Any] = _like(OmegaConf.to_container(OmegaConf.create(dict(whole)), resolve=True), written)
    return resolved


def growth(text: str, whole: Mapping[str, Any], known: dict[str, int], trail: tuple[str, ...] = ()) -> int:
    """Length of the resolved text, at most MAX_RESULT + 1. `known` caches lengths by reference.

    Raises ValueError for a reference to a missing key or a cycle.
    """
    total = len(text)
    for reference in _references(text):
        if reference in trail:
            raise ValueError(f"refers to itself: {' -> '.join((*trail, reference))}")
        if reference not in known:
            inner = str(_find(reference, whole))
            known[reference] = growth(inner, whole, known, (*trail, reference)) if "${" in inner else len(inner)
        total = min(total + known[reference], MAX_RESULT + 1)
    return total


@lru_cache(maxsize=1024)
def _references(text: str) -> tuple[str, ...]:
    """The dotted keys that a text refers to. Raises ValueError for any other kind of reference."""
    try:
        tree = parse(text)
    except (GrammarParseError, RecursionError):
        raise ValueError(
            "has a `${` that is not a reference such as `${training.seed}`; write `\\${` for the text"
        ) from None
    found: list[str] = []
    _collect(tree, found)
    return tuple(found)


def _collect(tree: Any, found: list[str]) -> None:
    if isinstance(tree, OmegaConfGrammarParser.InterpolationResolverContext):
        raise ValueError(f"`{tree.getText()[:40]}` is refused: `${{..}}` may refer to keys only, never call a resolver")
    if isinstance(tree, OmegaConfGrammarParser.InterpolationNodeContext):
        key = tree.getText()[2:-1].strip()
        if key.startswith(".") or "$" in key or "[" in key:
            raise ValueError(f"`{tree.getText()[:40]}` is refused: write the full key, as in `${{training.seed}}`")
        found.append(key)
    for child in tree.getChildren() if isinstance(tree, ParserRuleContext) else ():
        _collect(child, found)


def _find(reference: str, whole: Mapping[str, Any]) -> object:
    value: Any = whole
    for part in reference.split("."):
        inside = {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
        if not isinstance(inside, dict) or part not in inside:
            raise ValueError(f"`${{{reference}}}` refers to a key that does not exist")
        value = inside[part]
    if isinstance(value, dict | list):
        raise ValueError(f"`${{{reference}}}` refers to a whole section or list; refer to one value")
    return value


def _like(value: Any, shape: Any) -> Any:
    """The part of `value` that has the keys of `shape`."""
    return {name: _like(value[name], child) for name, child in shape.items()} if isinstance(shape, Mapping) else value

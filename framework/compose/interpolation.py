"""`${section.key}` in values: it may refer to a key that holds one plain value, and to nothing else.

OmegaConf parses and resolves; here is only what is refused before it does. Resolvers would read the environment or call
code, references to whole sections and long chains would let a small file grow without bound.
"""

from collections.abc import Mapping
from typing import Any

from antlr4 import ParserRuleContext
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

MAX_TEXT = 4096
"""Characters of a text that refers to keys; OmegaConf's parser is in Python."""
MAX_RESULT = 65536
"""Characters such a text may grow to."""


def fault(value: object) -> str | None:
    """Why a written value cannot stand whatever else is written, or None."""
    if value == "???":
        return "`???` is left to be filled in: write a value"
    if not isinstance(value, str) or "${" not in value:
        return None
    if len(value) > MAX_TEXT:
        return f"a text that refers to keys with `${{..}}` is limited to {MAX_TEXT} characters"
    try:
        _references(value)
    except ValueError as error:
        return str(error)
    return None


def over(defaults: Mapping[str, Any], written: Mapping[str, Any], resolve: bool = False) -> Mapping[str, Any]:
    """What is written over the defaults, so that references can see every key."""
    whole = OmegaConf.merge(OmegaConf.create(dict(defaults)), OmegaConf.create(dict(written)))
    container = OmegaConf.to_container(whole, resolve=resolve)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def resolve(defaults: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """`written` with each reference replaced by what it refers to."""
    resolved: dict[str, Any] = _like(over(defaults, written, resolve=True), written)
    return resolved


def growth(text: str, whole: Mapping[str, Any], trail: tuple[str, ...] = ()) -> int:
    """Characters the text has once resolved. Raises ValueError when a reference leads nowhere, round, or too far."""
    total = len(text)
    for reference in _references(text):
        if reference in trail:
            raise ValueError(f"refers to itself: {' -> '.join((*trail, reference))}")
        value = _find(reference, whole)
        text = str(value)
        total += growth(text, whole, (*trail, reference)) if "${" in text else len(text)
        if total > MAX_RESULT:
            raise ValueError(f"grows to more than {MAX_RESULT} characters")
    return total


def _references(text: str) -> list[str]:
    """The dotted keys that a text refers to. Raises ValueError for any other kind of reference."""
    try:
        tree = parse(text)
    except (GrammarParseError, RecursionError):
        raise ValueError(
            "has a `${` that is no reference such as `${training.seed}`; write `\\${` for the text"
        ) from None
    found: list[str] = []
    _collect(tree, found)
    return found


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
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        key = int(part) if isinstance(value, list) and part.isdecimal() else part
        if not isinstance(inside, dict) or key not in inside:
            raise ValueError(f"`${{{reference}}}` refers to a key that does not exist")
        value = inside[key]
    if isinstance(value, dict | list):
        raise ValueError(f"`${{{reference}}}` refers to a whole section or list; refer to one value")
    return value


def _like(value: Any, shape: Any) -> Any:
    """The part of `value` that has the keys of `shape`."""
    return {name: _like(value[name], child) for name, child in shape.items()} if isinstance(shape, Mapping) else value

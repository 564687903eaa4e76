"""JSON Schema of a recipe file, for editors, with all accepted spellings."""

from collections.abc import Mapping, Sequence
from typing import Any

from framework.schema import choices
from framework.schema.config import TrainingConfig

_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_REFERENCE = {"type": "string", "pattern": r"\$\{[A-Za-z_]"}
_NUMBER = {"type": "string", "pattern": r"^[+-]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][+-]?[0-9]+)?$"}
"""Some YAML parsers read `1e-5` as text; here it is a number."""


def recipe_schema(presets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """JSON Schema of a recipe. `presets` has the shipped choices of each group; paths are accepted too."""
    schema: dict[str, Any] = _loosened(TrainingConfig.model_json_schema())
    sources = schema["$defs"]["DataParams"]["properties"]["eval"]["anyOf"]
    sources.append({"type": "object", "additionalProperties": sources[0]})  # named sets
    groups = {
        group: {
            "anyOf": [{"enum": list(names)}, {"type": ["string", "array", "null"]}],
            "description": f"A preset of {group}.",
        }
        for group, names in presets.items()
    }
    prefixed = {f"^((override|optional) )?/?({'|'.join(presets)})$": {"type": ["string", "array", "null"]}}
    chosen = {"type": "object", "properties": groups, "patternProperties": prefixed}
    item = {"anyOf": [{**chosen, "additionalProperties": False, "maxProperties": 1}, {"const": "_self_"}]}
    defaults = {"type": "array", "items": item, "description": "Presets that apply before the recipe's own keys."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "tunesmith recipe",
        "properties": {"defaults": defaults, **schema["properties"]},
    }


def _loosened(fragment: Any) -> Any:
    """The fragment with JSON Schema's names of bounds, and with all accepted spellings of scalars."""
    if isinstance(fragment, list):
        return [_loosened(item) for item in fragment]
    if not isinstance(fragment, dict):
        return fragment
    loose = {_BOUNDS.get(key, key): value if key == "enum" else _loosened(value) for key, value in fragment.items()}
    notes = {
        key: loose.pop(key)
        for key in ("title", "description", "default")
        if key in loose and (key == "default" or isinstance(loose[key], str))
    }
    kind = loose.get("type")
    if "enum" in loose:
        loose = {"anyOf": [loose, _spellings(loose["enum"]), _REFERENCE]}
    elif kind in ("integer", "number"):
        loose = {"anyOf": [loose, _NUMBER, _REFERENCE]}
    elif kind == "boolean":
        loose = {"anyOf": [loose, _REFERENCE]}
    elif kind == "array":
        append = {"type": "object", "properties": {"append": loose}, "required": ["append"]}
        loose = {"anyOf": [loose, {**append, "additionalProperties": False}]}
    return notes | loose


def _spellings(words: Sequence[str]) -> dict[str, Any]:
    """A pattern for all spellings of a `Choice`, in any letter case."""
    found = next(kind for kind in choices.Choice.__subclasses__() if [str(member) for member in kind] == list(words))
    accepted = [*words, *found.other_spellings()]
    letters = ["".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in word) for word in accepted]
    return {"type": "string", "pattern": f"^({'|'.join(letters)})$"}

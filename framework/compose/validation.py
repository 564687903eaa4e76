"""Validation of plain values as `TrainingConfig`, with readable messages for pydantic's errors."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from framework.compose.reading import MAX_PROBLEMS
from framework.errors import Problem
from framework.schema.config import SCHEMA_VERSION, TrainingConfig
from framework.schema.keys import Path, dotted, key_at, up_to_list
from framework.schema.spelling import alike

_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""YAML 1.1's spellings of true and false, and quoted ones."""
_BOOLEANS |= {"true": "true, without quotes", "false": "false, without quotes"}
_VERSIONS = "1" if SCHEMA_VERSION == 1 else f"1 to {SCHEMA_VERSION}"
_PREFERENCE = "preference, with training.preference.loss_type"
_SYNONYMS = {
    "training.task": {
        **{name: f"{_PREFERENCE}={name}" for name in ("dpo", "ipo", "orpo", "simpo", "kto")},
        **{"pt": "pretrain", "cpt": "pretrain", "pretraining": "pretrain", "rm": "reward", "kd": "distillation"},
        **{"gkd": "distillation", "finetune": "sft", "instruct": "sft"},
    },
}
"""Key -> another tool's value -> ours, for values that are not spelled alike."""


def validate(
    written: Mapping[str, Any],
    place: Callable[[Path], str | None],
    problems: list[Problem],
    reported: frozenset[Path] = frozenset(),
) -> tuple[TrainingConfig, frozenset[str]]:
    """The config of all valid keys, and the dotted keys that were left out as invalid.

    Adds a problem for each bad value. A bad value inside a list or mapping invalidates the whole key, and a bad
    required value its section. `reported` are paths of bad values from earlier passes.
    """
    try:
        return TrainingConfig.model_validate(written), frozenset()
    except ValidationError as error:
        complaints = {
            _path(dict(detail), written): dict(detail) for detail in reversed(error.errors(include_url=False))
        }
    for path, detail in list(reversed(complaints.items()))[:MAX_PROBLEMS]:
        if path not in reported:
            problems.append(_problem(path, detail, place(path)))
    bad = {up_to_list(path[:-1] if item["type"] == "missing" else path) for path, item in complaints.items()}
    rest: Mapping[str, Any] = written
    for path in bad:
        rest = _without(rest, path)
    config, more = validate(rest, place, problems, reported | complaints.keys())
    return config, more | {dotted(path) for path in bad}


def shown(value: object) -> str:
    """A value for a message, shortened if long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path(detail: dict[str, Any], written: Any) -> Path:
    """The written path of a pydantic error, without its markers for union branches."""
    path: list[str | int] = []
    value = written
    for part in detail["loc"]:
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(inside, dict) or part not in inside:
            break
        path.append(part)
        value = inside[part]
    return (*path, detail["loc"][-1]) if detail["type"] == "missing" else tuple(path)


def _problem(path: Path, detail: dict[str, Any], where: str | None) -> Problem:
    key = key_at(path)
    expected = key.expected if key else None
    if expected and isinstance(path[-1], int):
        expected = expected.removeprefix("a list, each item ")
    if detail["type"] == "missing":
        return Problem(dotted(path), "is missing", where, expected)
    value = detail["input"]
    if path == ("schema_version",):
        expected = _VERSIONS
    if path == ("schema_version",) and detail["type"] in ("less_than_equal", "greater_than_equal"):
        return Problem("schema_version", _other_version(int(float(value))), where, expected)
    nearest = None
    if isinstance(value, str) and key:
        word = value.lower()
        begun = [choice for choice in key.choices if len(word) > 2 and choice.startswith(word)]
        nearest = next(iter([*begun, *alike(word, key.choices, 1)]), None)
        nearest = _SYNONYMS.get(dotted(path), {}).get(word, nearest)
        if expected and "true or false" in expected:
            nearest = _BOOLEANS.get(word, nearest)
    if isinstance(value, str) and key and key.is_list and value:
        if "path" in key.children:
            nearest = f"{{path: {value}}}" if isinstance(path[-1], int) else f"[{{path: {value}}}]"
        elif not key.children and not isinstance(path[-1], int):
            nearest = f"[{value}]"
    if expected == "text" and isinstance(value, int | float):
        expected = "text, in quotes"
    if expected == "text" and detail["type"] == "value_error":  # the key's own check has a better message
        return Problem(dotted(path), str(detail["ctx"]["error"]), where, None, nearest)
    why = ", since no search decides it" if value == "auto" and key else ""
    return Problem(dotted(path), f"cannot be {shown(value)}{why}", where, expected, nearest)


def _other_version(version: int) -> str:
    """Message for a recipe with another schema version."""
    if version < 1:
        return f"there is no schema version {version}; the newest is {SCHEMA_VERSION}"
    return f"this recipe needs schema version {version}, you have {SCHEMA_VERSION}: upgrade tunesmith"


def _without(written: Mapping[str, Any], path: Path) -> dict[str, Any]:
    rest = {name: value for name, value in written.items() if name != path[0] or len(path) > 1}
    if len(path) > 1 and isinstance(rest.get(str(path[0])), Mapping):
        rest[str(path[0])] = _without(rest[str(path[0])], path[1:])
    return rest

"""Tables of the tools (`tables/*.yaml`) and the engine that applies them.

A table has, at its top and in groups that hold under a condition (`adapter`, `sharded`, `preference`, ...):

- `same`: their key -> ours, where the value means the same.
- `values`: their key -> ours -> their value -> ours. Theirs is in lower case, may be a pattern of `fnmatch`, and `else`
  is any other. Ours is a value, `{value:, comment:}`, or a reason why it is not carried, `{default: text}`, with theirs
  for `{value}`. `nothing` stands for our key where only reasons follow.
- `defaults`: their key -> ours -> the value it has there where none is written.
- `switches`: section -> the key that turns it on; what stands there while that is not true asks for nothing.
- `left`: reason (a name of `Why`) -> text -> keys, in one string.

At the top, `refused` lists what makes a file none of ours. Whatever else a table holds, its tool's module reads.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from framework.converters.translation import Translation, Why

WHY = {"absent": Why.ABSENT, "default": Why.DEFAULT, "not_ours": Why.NOT_OURS, "write": Why.WRITE}


@cache
def table(name: str) -> dict[str, Any]:
    """The table of that name."""
    rows: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "tables" / f"{name}.yaml").read_text("utf-8"))
    return rows


def refuse(t: Translation, rows: Mapping[str, Any]) -> None:
    """Raises RequestError for the first row of `refused` that the file matches.

    A row matches where one of its `keys` has a value: any, one of `in`, or none of `not_in`.
    """
    for row in rows["refused"]:
        for key in row["keys"].split():
            word = t.source.text(key)
            is_named = any(fnmatchcase(word, pattern) for pattern in row.get("in", row.get("not_in", ())))
            is_asked = bool(word) if "in" in row or "not_in" in row else _has_value(t, key)
            if is_asked and is_named is not ("not_in" in row or "in" not in row):
                raise t.source.refuse(key, _filled(t, key, row["message"]), row["expected"])


def _has_value(t: Translation, key: str) -> bool:
    return t.source.get(key) is not None or any(t.source.below(key))


def apply(t: Translation, rows: Mapping[str, Any], tool: str) -> None:
    """Carries what a table, or a group of one, says. Where two keys set the same one of ours, the first does."""
    for theirs, targets in rows.get("values", {}).items():
        for ours, choices in targets.items():
            _carry_value(t, theirs, ours, choices)
    for theirs, ours in rows.get("same", {}).items():
        value = t.source.get(theirs)
        if value is not None and all(theirs != row.key for row in t.left):
            _put(t, ours, value, theirs)
    for theirs, targets in rows.get("defaults", {}).items():
        for ours, value in targets.items():
            is_moot = ours == "training.num_train_epochs" and t.has("training.max_steps")
            if t.source.get(theirs) is None and not is_moot and ours not in t.entries:
                value, comment = _with_comment(value)
                t.put(ours, value, theirs, comment=comment or f"{tool}'s default")


def leave(t: Translation, rows: Mapping[str, Any], section: str = "") -> None:
    """Gives the reasons of `left` for the values that nothing has become of; the keys are those inside `section`."""
    for part, switch in rows.get("switches", {}).items():
        if t.source.get(switch) is not True:
            for key in filter(t.is_open, list(t.source.below(part))):
                t.leave(key, Why.DEFAULT, f"off: {switch} is not true")
    for why, texts in rows["left"].items():
        for text, keys in texts.items():
            for name in keys.split():
                for key in (f"{section}{name}", *t.source.below(f"{section}{name}")):
                    if key in t.source.leaves and t.is_open(key):
                        t.leave_unless_off(key, WHY[why], text)


def _carry_value(t: Translation, theirs: str, ours: str, choices: Mapping[Any, Any]) -> None:
    value = t.source.get(theirs)
    if value is None:
        return
    word = "" if isinstance(value, list | dict) else str(value).lower()
    named = {str(choice).lower(): found for choice, found in choices.items()}
    matched = next((choice for choice in named if choice != "else" and fnmatchcase(word, choice)), "else")
    if matched not in named:
        t.source.text(theirs)  # a value that is no word is noted there
        return
    found = named[matched]
    reason = next(iter(found), "") if isinstance(found, dict) else ""
    if reason in WHY:
        t.leave(theirs, WHY[reason], _filled(t, theirs, found[reason]))
        return
    found, comment = _with_comment(found)
    _put(t, ours, found, theirs, comment)


def _put(t: Translation, ours: str, value: Any, theirs: str, comment: str = "") -> None:
    there = t.entries.get(ours)
    if there is None:
        t.put(ours, value, theirs, comment=comment)
    elif there.value == value:
        t.put(ours, value, *there.of, theirs, comment=there.comment)


def _with_comment(value: Any) -> tuple[Any, str]:
    return (value["value"], value.get("comment", "")) if isinstance(value, dict) else (value, "")


def _filled(t: Translation, key: str, text: str) -> str:
    return text.replace("{value}", str(t.source.get(key)))

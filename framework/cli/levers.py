"""The verb that prints the table of memory levers."""

from typing import TYPE_CHECKING, Annotated

import typer

from framework.cli.arguments import Json
from framework.cli.printing import print_columns, print_json, print_text
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.memory.levers import Lever


def levers(
    key: Annotated[str | None, typer.Argument(help="A key such as training.optimizer; all of them without it.")] = None,
    as_json: Json = False,
) -> None:
    """Show what trades memory: each lever's values from free to dear, what it shrinks and what it costs."""
    from framework.memory.levers import LEVERS

    rows = LEVERS if key is None else (_find(key),)
    if as_json:
        print_json({"levers": [row.to_json() for row in rows]})
    elif key is not None:
        _print_one(rows[0])
    else:
        head = ("key", "values, from free to dear", "shrinks", "training")
        cells = [(row.key, _values(row), ", ".join(row.shrinks) or "-", _exactness(row)) for row in rows]
        print_columns([head, *cells])


def _find(key: str) -> "Lever":
    from framework.compose.shipped import nearest
    from framework.memory.levers import LEVERS, lever
    from framework.schema.keys import every_key, unknown

    try:
        return lever(key)
    except KeyError:
        names = [row.key for row in LEVERS]
        is_key = key in every_key()
        message = f"{key} trades no memory" if is_key else unknown(tuple(key.split(".")))[0]
        likely = nearest(key, names) or nearest(key.rpartition(".")[2], names)
        raise RequestError([Problem(key, message, None, "a key of `tunesmith levers`", likely)]) from None


def _print_one(row: "Lever") -> None:
    from framework.memory.levers import word

    print_text(f"{row.key}\n  {row.line}")
    print_text(f"  shrinks    {', '.join(row.shrinks) or 'nothing by itself'}\n  read back  {row.reader}")
    print_text("  settings, from free to dear:")
    for setting in row.settings:
        print_text(f"    {row.key}={word(setting.value)}")
        facts = {
            "time": setting.time,
            "changes": setting.changes or ("" if setting is row.settings[0] else "nothing but rounding"),
            "hardware": setting.hardware,
            "package": setting.package,
            "needs": " ".join(f"{name}={word(value)}" for name, value in setting.beside.items()),
        }
        for name, text in facts.items():
            if text:
                print_text(f"      {name:9s}{text}")


def _values(row: "Lever") -> str:
    from framework.memory.levers import word

    return ", ".join(word(value) for value in row.values)


def _exactness(row: "Lever") -> str:
    from framework.memory.levers import word

    changed = [word(setting.value) for setting in row.settings if setting.changes]
    return f"changed by {', '.join(changed)}" if changed else "exact"

"""Changes that a disk, an editor or an unkind author may make to a text, and values that nobody expects."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**70, -(2**70), 1.5, -0.5, 1e300, float("inf"), float("nan"), 9**400),
    *(
        "",
        "x",
        "auto",
        "1e5x",
        "9" * 5000,
        "\ud800",
        "\x1b[31m",
        "\x00",
        "\u202e",
        "\u0663",
        "${x}",
        "../../x",
        "/dev/zero",
    ),
    *([], {}, [[]], [1], [None], {"a": 1}, {"": {}}, [{"a": [1, {"b": None}]}]),
]
BYTES = [
    *(b"\xe9", b"\x00", b"9" * 5000, b"[" * 2000, b"[", b"{", b"}", b"\xff\xfe", b"\n", b"\r", b'"', b"'", b"-", b":"),
    *(b"e999", b"NaN", b"\\", b"\\u0000", b"\\ud800", b"null", b"# ", b"\x1b]0;x\x07"),
    *(text.encode() for text in ("\u0663", "\u00b2", "\u202e", "\ufeff", "\u2028", "\U0001f600")),
]
NUMBERS = [b"9" * 5000, b"-1", b"1e400", b"0", b"9" * 30, b"0.0", b"00", b"nan", "\u0663".encode()]
REMOVED = object()


def damaged(data: bytes, dice: random.Random, times: int = 4) -> bytes:
    """Some bytes changed, removed, doubled or put between, or the rest cut off."""
    found = bytearray(data)
    for _ in range(dice.randrange(1, times)):
        at = dice.randrange(len(found) + 1)
        action = dice.randrange(6)
        if action == 0 and at < len(found):
            found[at] = dice.randrange(256)
        elif action == 1:
            del found[at : at + dice.randrange(1, 40)]
        elif action == 2:
            found[at:at] = dice.choice(BYTES)
        elif action == 3:
            del found[at:]
        elif action == 4:
            found[at:at] = found[max(at - dice.randrange(1, 400), 0) : at]
        elif numbers := list(re.finditer(rb"\d+", bytes(found))):
            number = dice.choice(numbers)
            found[number.start() : number.end()] = dice.choice(NUMBERS)
    return bytes(found)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def changed(document: Any, dice: random.Random) -> Any:
    """A copy of a document of JSON with another value in some place, or without what was there."""
    at = dice.choice([*places(document)])
    value = dice.choice([REMOVED, *VALUES])
    if not at:
        return None if value is REMOVED else value
    copy = json.loads(json.dumps(document))
    holder = copy
    for key in at[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return copy


def dumped(document: Any) -> bytes:
    """JSON with what JSON may not hold: numbers that are none, lone surrogates."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")

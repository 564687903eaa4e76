"""Chat templates compiled so that no single step of one takes long or much memory.

A template is a program that came with a model. What it does step by step is ended by a limit on processor time and
memory; one call of C (a format a billion characters wide, the product of long numbers) cannot be interrupted, so that
it is refused before it begins.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import BuiltinMethodType
from typing import Any
from unittest.mock import patch

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST_MADE = 10_000_000
"""Characters or members that one step may make. The longest conversations that are trained on have a tenth of it."""
MOST_BITS = 4096
"""Of a number that one step may make."""
MOST_BETWEEN = 1000
"""Characters of what is put between lines or the members of a list."""
_WIDE = re.compile(r"\d{6}")
_TEXTS = (str, bytes, bytearray)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers renders templates in, whose steps are bounded."""

    intercepted_binops = frozenset(("*", "%", "**"))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result. Raises SecurityError where it would be too large."""
        if operator == "%" and isinstance(left, _TEXTS):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            for much, times in ((left, right), (right, left)):
                if isinstance(much, (*_TEXTS, list, tuple)) and isinstance(times, int):
                    _check(len(much) * times)
        if operator != "%" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, MOST_BITS, "bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **options: Any) -> Any:
        """What the function returns. Raises SecurityError where it would be too large."""
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, (*_TEXTS, int, float)):
            _check_method(function.__name__, function.__self__, (*arguments, *options.values()))
        return super().call(context, function, *arguments, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own `str.format`, with widths that are bounded."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def bounded(*arguments: Any, **options: Any) -> str:
            _check_format(value.__self__, (*arguments, *options.values()))
            return wrapped(*arguments, **options)

        return bounded


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each bounded as it is set: transformers puts one of its own in place of jinja's."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments, other than what it is applied to, are bounded."""
    first = 2 if hasattr(function, "jinja_pass_arg") else 1  # the context or the environment comes before the value

    @wraps(function)  # with the mark of what is passed to it
    def bounded(*arguments: Any, **options: Any) -> Any:
        value, rest = arguments[first - 1] if len(arguments) >= first else "", (*arguments[first:], *options.values())
        if name == "format":
            _check_format(str(value), rest)
        elif name == "replace":
            _check_replaced(str(value), rest)
        elif name == "join":
            _check_joined(rest[0] if rest else "", value)
        else:
            _check_numbers(rest)
            _check(max((len(item) for item in rest if isinstance(item, str)), default=0), _between(name))
        return function(*arguments, **options)

    return bounded


def _between(name: str) -> int:
    return MOST_BETWEEN if name in ("indent", "tojson", "wordwrap") else MOST_MADE


def _check_method(name: str, own: Any, arguments: tuple[Any, ...]) -> None:
    _check_numbers(arguments)
    if name == "replace" and isinstance(own, str):
        _check_replaced(own, arguments)
    elif name == "join":
        _check_joined(own, arguments[0] if arguments else ())
    elif name == "expandtabs":
        _check(len(own) * max((item for item in arguments if isinstance(item, int)), default=8))


def _check_replaced(text: str, arguments: tuple[Any, ...]) -> None:
    if len(arguments) > 1:
        _check(text.count(str(arguments[0])) * len(str(arguments[1])))


def _check_joined(between: Any, members: Iterable[Any]) -> None:
    if isinstance(between, (*_TEXTS,)):
        _check(len(between), MOST_BETWEEN)
    if isinstance(members, list | tuple):
        _check(sum(len(member) for member in members if isinstance(member, (*_TEXTS,))))


def _check_format(text: str | bytes | bytearray, arguments: tuple[Any, ...]) -> None:
    """Widths stand in the text, or are arguments."""
    written = text if isinstance(text, str) else text.decode("latin-1")
    if _WIDE.search(written):
        raise SecurityError(f"it asks for a format as wide as {written[:40]!r}")
    if "*" in written or "{" in written:
        _check_numbers(arguments)


def _check_numbers(arguments: Iterable[Any]) -> None:
    for item in arguments:
        if isinstance(item, int):
            _check(abs(item), MAX_RANGE, "times or characters")


def _check(count: int, most: int = MOST_MADE, of: str = "characters or members") -> None:
    if count > most:
        raise SecurityError(f"a step of it would make more than {most:,} {of}")


@cache
def compiled(template: str) -> Any:
    """transformers' own compiled template, with bounded steps; its globals in one mapping, for each rendering goes
    through them. transformers finds it in its cache when it renders the same text."""
    with patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", BoundedEnvironment):
        made = chat_template_utils._compile_jinja_template(template)
    made.globals = dict(made.globals)
    return made

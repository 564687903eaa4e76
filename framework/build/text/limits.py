"""Limits of processor time and memory for foreign code that runs in this process, such as a chat template.

A template is a program that comes with a model. Python code in it is interrupted by a limit on processor time and
memory; a single C call (a format a billion characters wide, a product of huge numbers) cannot be interrupted, so it is
refused before it starts.
"""

import contextlib
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import BuiltinMethodType, FrameType
from typing import Any, TypeVar
from unittest.mock import patch

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

T = TypeVar("T")


MOST_BYTES = 2**30
"""Bytes that the process may grow during one call. Templates make texts of a few MB."""
TICKS = 10
"""Checks within the time limit of a call. In a tenth of a second a text that is doubled repeatedly grows by 1 GB."""


class OutOfTime(BaseException):
    """The limit that was reached, as text. Not an Exception, so that no handler in foreign code catches it."""


@dataclass
class _Watch:
    """Counter of the timer ticks during one call, with the growth of the process at each."""

    seconds: float
    call: int = 0
    seen: int = -1
    ticks: int = 0
    resident: int = 0
    is_at_work: bool = False

    def tick(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_at_work:
            self.seen = -1
        elif self.call != self.seen:
            self.seen, self.ticks, self.resident = self.call, 0, _resident()
        else:
            self.ticks += 1
            if self.ticks >= TICKS:
                raise OutOfTime(f"more than {self.seconds:g} s")
            if _resident() - self.resident > MOST_BYTES:
                raise OutOfTime(f"more than {MOST_BYTES / 2**30:g} GiB of memory")


def _resident() -> int:
    """Resident bytes of this process; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


_watches: list[_Watch] = []


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Limit every `limited` call in the block to this many seconds of processor time (plus up to a tenth), whatever
    else the machine does. One timer serves many calls, since setting it takes as long as a short call.

    Only Python's main thread can be interrupted: in other threads, and on systems without such a timer, there is no
    limit.
    """
    if _watches or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "ITIMER_VIRTUAL"):
        yield
        return
    _watches.append(_Watch(seconds))
    before = signal.signal(signal.SIGVTALRM, _watches[0].tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds / TICKS, seconds / TICKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before if before is not None else signal.SIG_DFL)
        _watches.clear()


def limited(call: Callable[[], T]) -> T:
    """Result of the call. Raises OutOfTime if it exceeds the limit of `watched`."""
    if not _watches or threading.current_thread() is not threading.main_thread():
        return call()
    watch = _watches[0]
    watch.call += 1
    watch.is_at_work = True
    try:
        return call()
    finally:
        watch.is_at_work = False


MOST_MADE = 10_000_000
"""Characters or members that one step may produce. The longest training conversations have a tenth of it."""
MOST_BITS = 4096
"""Bits of a number that one step may produce."""
MOST_BETWEEN = 1000
"""Characters of a separator between lines or members of a list."""
_WIDE = re.compile(r"\d{6}")
_TEXTS = (str, bytes, bytearray)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which transformers renders templates, with bounded steps."""

    intercepted_binops = frozenset(("*", "%", "**"))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Result of the operator. Raises SecurityError if it would be too large."""
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
        """Result of the function. Raises SecurityError if it would be too large."""
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, (*_TEXTS, int, float)):
            _check_method(function.__name__, function.__self__, (*arguments, *options.values()))
        return super().call(context, function, *arguments, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's own `str.format`, with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def bounded(*arguments: Any, **options: Any) -> str:
            _check_format(value.__self__, (*arguments, *options.values()))
            return wrapped(*arguments, **options)

        return bounded


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each bounded when it is set, since transformers replaces one of jinja's."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with bounds on its arguments other than the value."""
    first = 2 if hasattr(function, "jinja_pass_arg") else 1  # the context or the environment comes before the value

    @wraps(function)  # copies jinja's marks on the function
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
            most = MOST_BETWEEN if name in ("indent", "tojson", "wordwrap") else MOST_MADE
            _check(max((len(item) for item in rest if isinstance(item, str)), default=0), most)
        return function(*arguments, **options)

    return bounded


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
    """Bound the widths, which are in the text or among the arguments."""
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
        raise SecurityError(f"a single step would produce more than {most:,} {of}")


@cache
def compiled(template: str) -> Any:
    """transformers' compiled template with bounded steps, put into transformers' cache. Its globals are one dict, since
    each rendering copies them."""
    with patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", BoundedEnvironment):
        made = chat_template_utils._compile_jinja_template(template)
    made.globals = dict(made.globals)
    return made

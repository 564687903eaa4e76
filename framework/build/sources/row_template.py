"""`template` of a source: columns rendered from a row's own with Jinja, in the sandbox of chat templates."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError

from framework.build.hub import nearest, one_line
from framework.build.sources.files import Fault
from framework.build.text.limits import BoundedEnvironment, OutOfTime, limited, watched
from framework.errors import Problem, RequestError

RENDER_SECONDS = 1.0
"""Limit of processor time for one column of one row, as for one rendering of a chat."""
_COLUMN = re.compile(r"\s*\{\{-?\s*([A-Za-z_]\w*)\s*-?\}\}\s*")
"""A template that is just one column, whose value is kept as it is, a list of turns included."""
_MISSING = re.compile(r"'(\w+)' is undefined")

Make = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class RowTemplate:
    """Functions that make each of our columns from a row."""

    key: str
    columns: Mapping[str, Make]

    def apply(self, record: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """The rendered row, or a Fault. Raises RequestError if the template does not terminate."""
        made: dict[str, Any] = {}
        for name, make in self.columns.items():
            try:
                with watched(RENDER_SECONDS):
                    made[name] = limited(partial(make, record))
            except OutOfTime as error:
                message = f"takes {error} for one row"
                raise RequestError([Problem(f"{self.key}.{name}", message, expected="milliseconds")]) from None
            except UndefinedError as error:
                return Fault(f"{self.key}.{name}: {_undefined(error, record)}")
            except Exception as error:  # any type: a template runs arbitrary expressions
                return Fault(f"{self.key}.{name}: {one_line(error)}")
        return made


def read_row_template(written: str | Mapping[str, Any] | None, key: str) -> RowTemplate | None:
    """The template of a source: Jinja texts by our column names, or one text for the column `text`.

    Raises RequestError with every invalid template.
    """
    if written is None:
        return None
    texts = {"text": written} if isinstance(written, str) else written
    environment = BoundedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    problems, columns = list(_refused(texts, key)), dict[str, Make]()
    for name, text in texts.items() if not problems else ():
        try:
            columns[name] = _maker(environment, text)
        except TemplateSyntaxError as error:
            problems.append(Problem(f"{key}.{name}", f"is not a Jinja template: line {error.lineno}: {error.message}"))
    if problems:
        raise RequestError(problems)
    return RowTemplate(key, columns)


def _maker(environment: BoundedEnvironment, text: str) -> Make:
    if column := _COLUMN.fullmatch(text):
        return lambda record: _value(record, column[1])
    template = environment.from_string(text)
    return lambda record: template.render(record)


def _value(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise UndefinedError(f"'{name}' is undefined")
    return record[name]


def _shown(value: Any) -> Any:
    """Value for Jinja: an empty cell is an empty text."""
    return "" if value is None else value


def _refused(texts: Mapping[str, Any], key: str) -> Iterator[Problem]:
    if not texts:
        yield Problem(key, "makes no column", expected="`{prompt: ..., completion: ...}`, or a text")
    for name, text in texts.items():
        if not isinstance(text, str):
            yield Problem(f"{key}.{name}", f"is {text!r}", expected="a Jinja text, such as '{{ question }}'")


def _undefined(error: UndefinedError, record: Mapping[str, Any]) -> str:
    missing = _MISSING.search(str(error))
    close = nearest(missing[1], record) if missing else None
    hint = f"; did you mean `{close}`?" if close else ""
    return f"{error}; the columns are: {', '.join(record)}{hint}"

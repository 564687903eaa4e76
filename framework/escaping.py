"""Texts on a page: no markup, nothing that a reader would not see, and small tables as a notebook shows them."""

import html
from collections.abc import Iterable, Sequence

from framework.terminal import visible


def escape(text: str) -> str:
    """The text for HTML, attributes included, with control characters and marks of direction shown."""
    return html.escape(visible(text))


def paragraph(sentence: str) -> str:
    """A sentence."""
    return f"<p>{escape(sentence)}</p>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. The first cell of a row is its name."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

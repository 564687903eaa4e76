"""HTML for pages and notebooks: escaped texts with invisible characters shown, and small tables."""

import html
from collections.abc import Iterable, Sequence

from framework.terminal import visible


def escape(text: str) -> str:
    """Escape a text for HTML, attributes included, and show control characters and marks of direction."""
    return html.escape(visible(text))


def paragraph(sentence: str) -> str:
    """A sentence."""
    return f"<p>{escape(sentence)}</p>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table. The first cell of each row is its header."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

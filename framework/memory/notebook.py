"""Small HTML tables, as a notebook shows them in place of a repr. A page of its own is made by `framework.reports`."""

import html
from collections.abc import Iterable, Sequence

from framework.terminal import visible


def paragraph(sentence: str) -> str:
    """A sentence."""
    return f"<p>{_escaped(sentence)}</p>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. The first cell of a row is its name."""
    head = "".join(f"<th>{_escaped(name)}</th>" for name in heading)
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(text: str) -> str:
    return html.escape(visible(text))

"""Small HTML tables, as a notebook shows them in place of a repr. A page of its own is made by `framework.reports`."""

from collections.abc import Iterable, Sequence

from framework.escaping import escape


def paragraph(sentence: str) -> str:
    """A sentence."""
    return f"<p>{escape(sentence)}</p>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. The first cell of a row is its name."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

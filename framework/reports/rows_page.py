"""The rows of a run as one HTML page that needs nothing else."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from framework.escaping import escape
from framework.reports.page import document, items
from framework.reports.rows import facts, headline, passage_line, shortened
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.run.preview import Passage, Preview, ShownRow

LONGEST = 20_000
"""Characters of a passage on the page; of a longer one the beginning and the end."""

STYLE = """
<style>
mark { background: #cdeccd; color: inherit; border-radius: 2px } .target { color: var(--good) }
@media (prefers-color-scheme: dark) { mark { background: #1d4d2b } }
.row { border-top: 1px solid var(--rule); padding: .75rem 0 } .row h3 { font-size: 1rem; margin: 0 0 .4rem }
.passages { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)) }
.passages > div { min-width: 0 } pre { background: color-mix(in srgb, var(--ink) 4%, transparent); border-radius: 4px;
  font: 13px/1.45 ui-monospace, monospace; margin: .2rem 0 0; max-height: 30rem; overflow: auto; padding: .6rem;
  white-space: pre-wrap; overflow-wrap: anywhere } .bar { background: var(--good); display: block; height: .7em }
td.wide { width: 50% }
</style>
"""


def data_page(title: str, preview: "Preview") -> str:
    """Everything that the terminal says, with the rows in full and the classes as bars."""
    made, split = preview.padding, preview.split
    supervised = f", {made.supervised / made.tokens:.1%} of the tokens supervised" if made.supervised else ""
    parts = [
        STYLE,
        f"<h1>{escape(title)}: {counted(split.kept, 'row')} to "
        f"{'train' if split.name == 'train' else 'evaluate'} on</h1>",
        f'<p class="soft">Task {escape(preview.task)}; {made.share:.1%} padding{supervised}.</p>',
        *items("Sources", preview.report.sources),
        "<h2>What became of the rows</h2>",
        f"<ul>{''.join(f'<li>{escape(line.strip())}</li>' for line in _sentences(preview))}</ul>",
        "<h2>Lengths</h2>",
        _table("Share of the rows", "tokens at most, as read", {**split.lengths}, "as trained on", preview.kept),
        *(_bars(preview.classes) if preview.classes is not None else ()),
        *items("Notes", preview.report.notes),
        *items("Warnings", preview.report.warnings, "warnings"),
        "<h2>Rows</h2>",
        '<p class="soft"><mark>Supervised tokens</mark> and context.</p>',
        *map(_row, preview.rows),
    ]
    return document(f"Rows of {title}", parts)


def _sentences(preview: "Preview") -> list[str]:
    return [*str(preview.split).splitlines(), *facts(preview)]


def _table(name: str, first: str, values: Mapping[str, int], second: str, others: Mapping[str, int]) -> str:
    rows = "".join(
        f"<tr><td>{float(share):.0%}</td><td>{values[share]}</td><td>{others.get(share, '')}</td></tr>"
        for share in values
    )
    head = "".join(f"<th>{escape(each)}</th>" for each in (name, first, second))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _bars(classes: Mapping[str, int]) -> Iterator[str]:
    most = max(classes.values(), default=0) or 1
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td>{count}</td><td class="wide">'
        f'<span class="bar" style="width:{count / most:.1%}"></span></td></tr>'
        for name, count in classes.items()
    )
    yield "<h2>Classes</h2>"
    yield f"<table><thead><tr><th>Class</th><th>rows</th><th></th></tr></thead><tbody>{rows}</tbody></table>"


def _row(row: "ShownRow") -> str:
    passages = []
    for passage in row.passages:
        head = f'<p class="soft">{escape(passage_line(passage))}</p>' if passage.name is not None else ""
        passages.append(f"<div>{head}<pre>{_written(passage)}</pre></div>")
    return f'<div class="row"><h3>{escape(headline(row))}</h3><div class="passages">{"".join(passages)}</div></div>'


def _written(passage: "Passage") -> str:
    parts = shortened(passage.pieces, "…", LONGEST)
    marked = ((escape(text), is_supervised) for text, is_supervised in parts)
    # A line break right behind <pre> is not shown, so one more stands there.
    return "\n" + "".join(f"<mark>{text}</mark>" if is_supervised else text for text, is_supervised in marked)

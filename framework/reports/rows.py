"""Rows with marked supervised tokens, as lines for a terminal and as an HTML page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from framework.escaping import escape
from framework.reports.page import document, items
from framework.schema.plural import counted
from framework.terminal import visible

if TYPE_CHECKING:
    from framework.run.preview import Passage, Piece, Preview, ShownRow

LONGEST = 1600
"""Most characters shown of a passage; of a longer one the beginning and the end."""
WIDE = 100
"""Minimum columns for showing the answers of a pair side by side."""
CLASSES = 30
"""Most listed classes; further ones are counted."""
SUPERVISED, OTHER, SOFT = "bold green", "", "dim"
"""Styles of supervised tokens, context, and remarks."""


@dataclass(frozen=True)
class Marks:
    """Marks around supervised text if colors are not available."""

    start: str
    end: str
    rest: str = "…"


BRACKETS = Marks("⟦", "⟧")
PLAIN = Marks("[[", "]]", "...")
"""For an output that cannot encode the others."""
COLOUR = Marks("", "")


def marks_for(encoding: str, is_coloured: bool) -> Marks:
    """The marks that an output needs and can encode."""
    if is_coloured:
        return COLOUR
    try:
        (BRACKETS.start + BRACKETS.end + BRACKETS.rest).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BRACKETS


def data_lines(title: str, preview: "Preview", width: int = 80, marks: Marks = BRACKETS) -> list[Text]:
    """Lines with the statistics of a split, then its first rows."""
    lines = [Text(f"{title}: {preview.task}", style="bold"), *map(Text, preview.report.sources), Text("")]
    lines += [Text(line) for line in str(preview.split).splitlines()]
    lines += [Text(f"  {sentence}") for sentence in facts(preview)]
    lines += [Text(note) for note in preview.report.notes]
    lines += [Text(f"warning: {warning}", style="yellow") for warning in preview.report.warnings]
    if preview.rows:
        lines += [Text(""), _legend(marks)]
    for row in preview.rows:
        lines += _row_lines(row, width, marks)
    return lines


def facts(preview: "Preview") -> list[str]:
    """Sentences about lengths, batches and classes in addition to the report's."""
    made, kept = preview.padding, preview.kept
    sentences = [
        f"kept rows: median {counted(kept['0.5'], 'token')}, 95 % have at most {kept['0.95']}, longest {kept['1.0']}"
    ]
    batches = counted(made.micro_batches, "micro-batch", "micro-batches")
    padding = f"{made.share:.1%} of the tokens of {batches} are padding"
    sentences.append(
        f"{padding}; the largest has {counted(made.rows, 'sequence')}, the widest {counted(made.longest, 'position')}"
    )
    if made.supervised:
        sentences.append(f"{made.supervised / made.tokens:.1%} of the tokens are supervised")
    if preview.classes is not None:
        sentences.append(f"classes: {format_classes(preview.classes)}")
    if preview.values is not None:
        low, middle, high = (preview.values[share] for share in ("0.0", "0.5", "1.0"))
        sentences.append(f"values: {low:g} to {high:g}, median {middle:g}")
    return sentences


def format_classes(classes: "dict[str, int]") -> str:
    """Each class with its number of rows, limited to the first ones."""
    shown = ", ".join(f"{visible(name)} {count}" for name, count in list(classes.items())[:CLASSES])
    return shown + (f", and {len(classes) - CLASSES} more" if len(classes) > CLASSES else "")


def headline(row: "ShownRow") -> str:
    """The heading of a row."""
    supervised = sum(passage.supervised for passage in row.passages)
    parts = [f"row {row.number}", counted(row.tokens, "token")]
    parts += [f"{supervised} supervised"] if supervised or row.target is None else []
    return ", ".join([*parts, *([] if row.target is None else [f"target: {visible(row.target)}"])])


def passage_line(passage: "Passage") -> str:
    """The heading of one of several passages."""
    relabelled = f", {passage.relabelled} with another label than the token" if passage.relabelled else ""
    return f"{passage.name}: {counted(passage.tokens, 'token')}, {passage.supervised} supervised{relabelled}"


def shortened(pieces: "tuple[Piece, ...]", rest: str, longest: int = LONGEST) -> "Iterator[tuple[str, bool]]":
    """Texts and whether they are supervised, without the middle if there are more than `longest` characters."""
    excess = sum(len(piece.text) for piece in pieces) - longest
    at, start, end = 0, longest // 2, longest // 2 + excess
    for piece in pieces:
        text = piece.text
        if excess > 0:
            first, last = text[: max(0, start - at)], text[max(0, end - at) :]
            is_cut_here = at <= start < at + len(text)
            text = first + (f" {rest} {excess} characters {rest} " if is_cut_here else "") + last
        at += len(piece.text)
        if text:
            yield text, piece.supervised


def _legend(marks: Marks) -> Text:
    if marks is COLOUR:
        return Text.assemble(("supervised tokens", SUPERVISED), (" and context", OTHER))
    return Text(f"{marks.start}supervised tokens{marks.end} and context")


def _row_lines(row: "ShownRow", width: int, marks: Marks) -> "Iterator[Text]":
    yield Text("")
    yield Text(headline(row), style="bold")
    if [passage.name for passage in row.passages] == ["chosen", "rejected"] and width >= WIDE:
        column = (width - 3) // 2
        heads = [passage_line(passage) for passage in row.passages]
        yield Text("   ".join(head[:column].ljust(column) for head in heads).rstrip(), style=SOFT)
        left, right = (_wrapped(_written(passage, marks), column) for passage in row.passages)
        for index in range(max(len(left), len(right))):
            one = left[index] if index < len(left) else Text("")
            other = right[index] if index < len(right) else Text("")
            yield Text.assemble(one, " " * (column - one.cell_len + 3), other)
        return
    for passage in row.passages:
        if passage.name is not None:
            yield Text(f"-- {passage_line(passage)}", style=SOFT)
        yield _written(passage, marks)


def _written(passage: "Passage", marks: Marks) -> Text:
    text = Text()
    for part, is_supervised in shortened(passage.pieces, marks.rest):
        shown = visible(part)
        text.append(
            f"{marks.start}{shown}{marks.end}" if is_supervised else shown, SUPERVISED if is_supervised else OTHER
        )
    return text


def _wrapped(text: Text, width: int) -> "list[Text]":
    from rich.console import Console

    lines = text.wrap(Console(width=width, soft_wrap=False), width, tab_size=4)
    return list(lines)


LONGEST_ON_PAGE = 20_000
"""Most characters of a passage on the page; of a longer one the beginning and the end."""

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
    """Page with everything that the terminal shows, with full rows and classes as bars."""
    made, split = preview.padding, preview.split
    supervised = f", {made.supervised / made.tokens:.1%} of the tokens supervised" if made.supervised else ""
    sentences = [*str(preview.split).splitlines(), *facts(preview)]
    rows = "".join(
        f"<tr><td>{float(share):.0%}</td><td>{length}</td><td>{preview.kept.get(share, '')}</td></tr>"
        for share, length in split.lengths.items()
    )
    head = "<th>Share of the rows</th><th>tokens at most, as read</th><th>as trained on</th>"
    parts = [
        STYLE,
        f"<h1>{escape(title)}: {counted(split.kept, 'row')} to "
        f"{'train' if split.name == 'train' else 'evaluate'} on</h1>",
        f'<p class="soft">Task {escape(preview.task)}; {made.share:.1%} padding{supervised}.</p>',
        *items("Sources", preview.report.sources),
        "<h2>What became of the rows</h2>",
        f"<ul>{''.join(f'<li>{escape(line.strip())}</li>' for line in sentences)}</ul>",
        "<h2>Lengths</h2>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
        *(_bars(preview.classes) if preview.classes is not None else ()),
        *items("Notes", preview.report.notes),
        *items("Warnings", preview.report.warnings, "warnings"),
        "<h2>Rows</h2>",
        '<p class="soft"><mark>Supervised tokens</mark> and context.</p>',
        *map(_row_html, preview.rows),
    ]
    return document(f"Rows of {title}", parts)


def _bars(classes: Mapping[str, int]) -> Iterator[str]:
    most = max(classes.values(), default=0) or 1
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td>{count}</td><td class="wide">'
        f'<span class="bar" style="width:{count / most:.1%}"></span></td></tr>'
        for name, count in classes.items()
    )
    yield "<h2>Classes</h2>"
    yield f"<table><thead><tr><th>Class</th><th>rows</th><th></th></tr></thead><tbody>{rows}</tbody></table>"


def _row_html(row: "ShownRow") -> str:
    passages = []
    for passage in row.passages:
        head = f'<p class="soft">{escape(passage_line(passage))}</p>' if passage.name is not None else ""
        passages.append(f"<div>{head}<pre>{_marked(passage)}</pre></div>")
    return f'<div class="row"><h3>{escape(headline(row))}</h3><div class="passages">{"".join(passages)}</div></div>'


def _marked(passage: "Passage") -> str:
    parts = shortened(passage.pieces, "…", LONGEST_ON_PAGE)
    marked = ((escape(text), is_supervised) for text, is_supervised in parts)
    # A line break directly after <pre> is not shown, so there is an additional one.
    return "\n" + "".join(f"<mark>{text}</mark>" if is_supervised else text for text, is_supervised in marked)

"""Detection of a row format from columns, and proposals for rows that match none."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from framework.build.hub import nearest
from framework.build.text.format_table import FORMATS, Format
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Supervise
from framework.schema.data import DatasetParams
from framework.schema.tasks import Task
from framework.schema.training import TrainingParams

KINDS: Mapping[Task, Sequence[RowFormat]] = {
    task: [name for name, row_format in FORMATS.items() if task in row_format.tasks] for task in Task
}


class Described(Protocol):
    """Rows of one format, with a line that describes them."""

    @property
    def row_format(self) -> RowFormat: ...
    @property
    def description(self) -> str: ...


def tasks_for(row_format: RowFormat) -> tuple[Task, ...]:
    """Tasks that train on rows of this format."""
    return FORMATS[row_format].tasks


def wrong_kind(row_format: RowFormat, task: Task) -> str | None:
    """Why the task cannot train on rows of this format, or None where it can."""
    if row_format in KINDS[task]:
        return None
    return f"rows of `{row_format}` are for the task {' or '.join(tasks_for(row_format))}, and the task is {task}"


def require_answers(training: TrainingParams, sources: Sequence[Described]) -> None:
    """Check that a preference's rows are pairs or single answers, as its loss needs. Raises RequestError."""
    if training.task is not Task.PREFERENCE:
        return
    wanted = RowFormat.PREFERENCE if training.has_pairs else RowFormat.UNPAIRED
    loss, key = training.preference.loss_type, "training.preference.loss_type"
    expected = "kto" if training.has_pairs else "dpo, ipo, orpo or simpo"
    for source in sources:
        if source.row_format is not wanted:
            message = f"{loss} needs `{wanted}` rows: {source.description}"
            raise RequestError([Problem(key, message, expected=f"{expected}, or rows of `{wanted}`")])


def require_learnable(supervise: Supervise | None, sources: Sequence[Described]) -> None:
    """Check `data.supervise` against the row formats of the sources. Raises RequestError."""
    for source in sources:
        if supervise is None or supervise in FORMATS[source.row_format].supervise:
            continue
        works = " or ".join(FORMATS[source.row_format].supervise)
        expected = f"{works}, or nothing" if works else "nothing"
        message = f"`{supervise}` {FORMATS[source.row_format].refusal}: {source.description}"
        raise RequestError([Problem("data.supervise", message, expected=expected)])


QUESTIONS = (
    *("prompt", "instruction", "question", "query", "problem", "request", "user", "human", "input", "source", "q"),
)
ANSWERS = (
    *("completion", "output", "answer", "response", "reply", "solution", "target", "assistant", "generation"),
    *("summary", "a"),
)
CONTEXTS = ("context", "passage", "document", "background", "input", "evidence")
BETTER = ("chosen", "preferred", "accepted", "better", "positive", "win")
WORSE = ("rejected", "dispreferred", "declined", "worse", "negative", "lose")
TEXTS = ("text", "content", "body", "document", "article", "passage", "sentence", "review", "code", "title")
LABELS = ("label", "labels", "class", "category", "sentiment", "intent", "target", "score", "rating")
"""Column names of public data sets with the same meaning, the likeliest first."""


def propose(record: Mapping[str, Any], task: Task) -> str | None:
    """A proposed setting with which rows like this one are read, or None."""
    proposals = (columns for row_format, columns in _proposals(record) if row_format in KINDS[task])
    found = next(proposals, None)
    if found is not None:
        pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in found.items() if ours != theirs)
        return f"columns: {{{pairs}}}" if pairs else None
    odd = next((name for name, value in record.items() if isinstance(value, list) and value), None)
    if odd is not None and RowFormat.MESSAGES in KINDS[task]:
        return f"messages: [{{role: user, content: ..}}, {{role: assistant, content: ..}}, ..] in place of `{odd}`"
    return None


def _proposals(record: Mapping[str, Any]) -> Iterator[tuple[RowFormat, dict[str, str]]]:
    for name, value in record.items():
        if _has_turns(value, "role", "content"):
            yield RowFormat.MESSAGES, {"messages": name}
        if _has_turns(value, "from", "value"):
            yield RowFormat.SHAREGPT, {"conversations": name}
    speaks = [name for name, value in record.items() if isinstance(value, str) or _has_turns(value, "role", "content")]
    better, worse = _first(BETTER, speaks), _first(WORSE, speaks)
    asks, answers = _first(QUESTIONS, speaks), _first(ANSWERS, speaks)
    if better and worse:
        yield RowFormat.PREFERENCE, {**({"prompt": asks} if asks else {}), "chosen": better, "rejected": worse}
    if asks and answers:
        context = _first(CONTEXTS, [name for name in speaks if name not in (asks, answers)])
        if context is not None or asks == "instruction":
            about = {"input": context} if context else {}
            yield RowFormat.ALPACA, {"instruction": asks, **about, "output": answers}
        else:
            yield RowFormat.PROMPT_COMPLETION, {"prompt": asks, "completion": answers}
    texts = [name for name, value in record.items() if isinstance(value, str)]
    text, label = _first(TEXTS, texts), _first(LABELS, [*record])
    if text and label:
        yield RowFormat.LABELLED, {"text": text, "label": label}
    if text or len(texts) == len(record) == 1:
        yield RowFormat.TEXT, {"text": text or texts[0]}


def _has_turns(value: Any, *names: str) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, dict) and {*names} <= {*turn} for turn in turns)


def _first(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column with the likeliest of the names, ignoring case."""
    plain = {column.lower().strip(): column for column in reversed(columns)}
    return next((plain[name] for name in names if name in plain), None)


def detect_format(columns: Sequence[str], mapping: Mapping[str, str], task: Task = Task.SFT) -> Format | None:
    """The first format whose required columns all exist, preferring those that the task supports.

    If there are tokens they are used, even next to a text: reading the text would discard hand-made labels.
    """
    found = [row_format for row_format in FORMATS.values() if not row_format.missing(columns, mapping)]
    if any(row_format.name is RowFormat.TOKENS for row_format in found):
        return FORMATS[RowFormat.TOKENS]
    suited = [row_format for row_format in found if row_format.name in KINDS[task]]
    return next(iter([*suited, *found]), None)


def _close(row_format: Format, columns: Sequence[str], mapping: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of required columns that exist, and a mapping for the others if each resembles an unused column."""
    missing = [column for column in row_format.needs if row_format.name_in(column, columns, mapping) not in columns]
    left = [column for column in columns if column not in row_format.names(mapping)]
    close = {column: nearest(column, left) for column in missing}
    if not all(close.values()) or len(set(close.values())) < len(close):
        return None
    pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in close.items())
    return len(row_format.needs) - len(missing), f"columns: {{{pairs}}}"


def choose_format(source: DatasetParams, record: Mapping[str, Any], key: str, task: Task) -> Format:
    """The format of a source whose first row is `record`: the one that is set, or the one detected.

    Raises RequestError if no format matches, if a required or mapped column is missing, and if the task does not
    support the format.
    """
    columns = list(record)
    found = ", ".join(columns) or "none"
    row_format = FORMATS[source.format] if source.format else detect_format(columns, source.columns, task)
    absent = [name for name in dict.fromkeys(source.columns.values()) if name not in columns]
    # With those columns the format may be another.
    if absent and (row_format is None or wrong_kind(row_format.name, task)):
        raise RequestError([_no_column(name, columns, key) for name in absent])
    if row_format is None:
        message, expected, close = unknown_format(record, source.columns, task)
        raise RequestError([Problem(key, message, expected=expected, nearest=close)])
    if wrong := wrong_kind(row_format.name, task):
        _, _, close = unknown_format(record, source.columns, task)
        raise RequestError([Problem(key, f"{wrong}; the columns are: {found}", nearest=close)])
    problems = []
    mapped = [name for column, name in source.columns.items() if column in row_format.columns and name not in columns]
    for name in dict.fromkeys([*row_format.missing(columns, source.columns), *mapped]):
        problems.append(_no_column(name, columns, key))
    for column in source.columns:
        if column not in row_format.columns:
            message = (
                f"rows of `{row_format.name}` have no column `{column}`; they may have {', '.join(row_format.columns)}"
            )
            problems.append(Problem(f"{key}.columns", message, nearest=nearest(column, row_format.columns)))
    if problems:
        raise RequestError(problems)
    return row_format


def _no_column(name: str, columns: Sequence[str], key: str) -> Problem:
    message = f"there is no column `{name}`; the columns are: {', '.join(columns) or 'none'}"
    return Problem(key, message, nearest=nearest(name, columns))


def unknown_format(
    record: Mapping[str, Any], mapping: Mapping[str, str], task: Task = Task.SFT
) -> tuple[str, str, str | None]:
    """Message, expected formats and nearest proposal for rows in no format that the task supports."""
    columns = list(record)
    formats = [FORMATS[name] for name in FORMATS if name in KINDS[task]]
    message = f"the columns are: {', '.join(columns) or 'none'}; no row format of the task {task} matches"
    expected = "; ".join(f"{row_format.name} ({', '.join(row_format.needs)})" for row_format in formats)
    guesses = (guess for row_format in formats if (guess := _close(row_format, columns, mapping)))
    close = max(guesses, key=lambda guess: guess[0], default=(0, None))
    return message, expected, propose(record, task) or close[1]

"""What a file's columns are probably meant as, where they are those of no form: an entry for `data.train.columns`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.build.text.task_formats import KINDS
from framework.schema.choices import RowFormat, Task

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
"""Names that public data sets use for the same thing, the likeliest first."""


def propose(record: Mapping[str, Any], task: Task) -> str | None:
    """What to write so that rows like this one are read, or None where nothing suggests itself."""
    proposals = (columns for form, columns in _proposals(record) if form in KINDS[task])
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
    """The column with the likeliest of the names, however it is capitalised."""
    plain = {column.lower().strip(): column for column in reversed(columns)}
    return next((plain[name] for name in names if name in plain), None)

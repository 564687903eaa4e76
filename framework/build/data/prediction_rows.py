"""Rows for predictions and sample prompts: read as in training, with optional answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from framework.build.data.rows import row_length, truncate
from framework.build.data.stream import ENCODE_BATCH
from framework.build.hub import nearest
from framework.build.sources.files import Fault, read_records
from framework.build.sources.find_files import find_files, is_local
from framework.build.sources.sources import PROBLEM_LIMIT, Place, read_source
from framework.build.text.chat import Chat, TemplateFault, has_template, render
from framework.build.text.encode import Encoding, StoredRow
from framework.build.text.format_table import FORMATS, Format
from framework.build.text.labels import IGNORED, Encoded, UnsuitedChat, encode_labelled
from framework.build.text.row_formats import QUESTIONS, detect_format
from framework.build.text.stored_rows import encode_batch, row_question
from framework.build.text.tokenizer import own_start
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Supervise, Truncation
from framework.schema.config import TrainingConfig
from framework.schema.data import DatasetParams, Split
from framework.schema.params import FrozenMapping
from framework.schema.plural import counted
from framework.schema.tasks import Task

KEY = "FILE"
ASKING: dict[RowFormat, str] = {
    RowFormat.TOKENS: "input_ids",
    RowFormat.MESSAGES: "messages",
    RowFormat.SHAREGPT: "conversations",
    RowFormat.ALPACA: "instruction",
    RowFormat.PROMPT_COMPLETION: "prompt",
    RowFormat.TEXT: "text",
}
"""Row formats with a prompt, in order of detection, and the column of the prompt."""


def read_texts(path: str, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Texts, or pairs of them, for a classifier or regression model; labels are ignored.

    Truncated as in training. Raises RequestError with every broken row.
    """
    source = _source(path, config)
    row_format = _asking(RowFormat.LABELLED, "text")

    def encode(rows: Sequence[StoredRow]) -> list[Encoded | str]:
        encoded = encode_labelled(tokenizer, [(row["text"] or "", row.get("text_pair")) for row in rows])
        return [
            _fitted(one, config) if row["text"] else "there is no text" for row, one in zip(rows, encoded, strict=True)
        ]

    return _encoded(path, _stored(path, lambda record: _need(row_format, list(record), source), source), encode)


def read_prompts(
    path: str, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, most: int | None
) -> list[Encoded]:
    """Prompts for a causal model, of at most `most` tokens: chats up to the answer, prompts, texts.

    Raises RequestError with every row that is broken or too long.
    """
    source = _source(path, config)

    def choose(record: Mapping[str, Any]) -> Format:
        columns = list(record)
        if source.format is not None and source.format in ASKING:
            return _need(_asking(source.format, ASKING[source.format]), columns, source)
        for name, column in ASKING.items():
            if FORMATS[name].name_in(column, columns, source.columns) in columns:
                return _asking(name, column)
        wanted = ", ".join(ASKING.values())
        message = f"no column is a prompt; the columns are: {', '.join(columns) or 'none'}"
        close = next(((name, found) for name in columns if (found := nearest(name, [*ASKING.values()]))), None)
        instead = f"`{close[1]}` in place of `{close[0]}`" if close else None
        asks = next((name for name in columns if name.lower() in QUESTIONS), None)
        instead = f"`prompt` in place of `{asks}`" if asks else instead
        raise RequestError([Problem(KEY, message, expected=f"one of: {wanted}", nearest=instead)])

    def encode(rows: Sequence[StoredRow]) -> list[Encoded | str]:
        return [encode_prompt(row, tokenizer, most) for row in rows]

    return _encoded(path, _stored(path, choose, source), encode)


def read_answered(path: str, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Rows with their answers, labelled as in training. Raises RequestError as training does.

    For a run trained on pairs or judged answers, plain answers are read as well.
    """
    asked, task = _source(path, config), config.training.task
    if task.facts.compares_answers:
        asked, task = _single_answers(asked) or (asked, task)
    source = read_source(asked, KEY, task)
    supervise = config.data.supervise
    if supervise is None and config.training.task.facts.splits_documents:
        supervise = Supervise.ALL
    encoding, found, problems = Encoding(tokenizer, supervise), list[Encoded](), list[Problem]()
    for batch in source.dataset.iter(batch_size=ENCODE_BATCH):
        places = map(Place, batch["path"], batch["row"])
        for place, row in zip(places, encode_batch(batch, encoding), strict=True):
            if isinstance(row, UnsuitedChat):
                _require_template(tokenizer)
            fitted = str(row) if row is None or isinstance(row, UnsuitedChat) else _fitted(row, config)
            fitted = "a column that it needs is absent or empty" if row is None else fitted
            if isinstance(fitted, Encoded) and not np.any(fitted.labels != IGNORED):
                fitted = f"no supervised token within {counted(config.longest, 'token')}"
            if isinstance(fitted, str):
                problems.append(Problem(KEY, fitted, where=str(place)))
            else:
                found.append(fitted)
    if problems:
        raise RequestError(problems[:PROBLEM_LIMIT])
    return found


def _source(path: str, config: TrainingConfig) -> DatasetParams:
    """The file as a source with the columns and format of the run's first source."""
    first = config.data.train[0] if config.data.train else None
    if first is None:
        return DatasetParams(path=path)
    return DatasetParams(path=path, columns=first.columns, format=first.format)


def _single_answers(source: DatasetParams) -> tuple[DatasetParams, Task] | None:
    """The file as a source of single answers, and a task that reads them; None if it has pairs or no answers."""
    # The columns of the first row; none if it cannot be read, which is reported when all rows are.
    files = find_files(source.path, Split("train"), KEY) if is_local(source.path) else []
    first = next((record for file in files for _, record in read_records(file)), None)
    columns, pair = (list(first) if isinstance(first, dict) else []), FORMATS[RowFormat.PREFERENCE]
    if any(pair.name_in(answer, columns, source.columns) in columns for answer in ("chosen", "rejected")):
        return None
    there = {ours: theirs for ours, theirs in source.columns.items() if theirs in columns}
    row_format = detect_format(columns, there, Task.SFT)
    if row_format is None:
        return None
    read = {ours: theirs for ours, theirs in there.items() if ours in row_format.columns}
    return DatasetParams(path=source.path, columns=FrozenMapping(read)), Task.SFT


def _stored(
    path: str, choose: Callable[[Mapping[str, Any]], Format], source: DatasetParams
) -> Iterator[tuple[Place, StoredRow | Fault]]:
    """Stored rows of the files, in the format detected from the first row."""
    row_format: Format | None = None
    for file in find_files(path, Split("train"), KEY):
        for number, record in read_records(file):
            place = Place(str(file), number)
            if isinstance(record, Fault):
                yield place, record
                continue
            row_format = row_format or choose(record)
            asks = row_format.name_in(row_format.needs[0], list(record), source.columns)
            if asks not in record:
                yield place, Fault(f"the row has no column `{asks}`; it has {', '.join(record) or 'none'}")
                continue
            if record[asks] is None:
                yield place, Fault(f"column `{asks}` is empty: there is no prompt")
                continue
            values = row_format.read(row_format.take(record, source.columns))
            yield place, Fault(values) if isinstance(values, str) else values


def _encoded(
    path: str,
    rows: Iterator[tuple[Place, StoredRow | Fault]],
    encode: Callable[[Sequence[StoredRow]], list[Encoded | str]],
) -> list[Encoded]:
    """The rows as tokens, in order. Raises RequestError for broken ones, and if there are none."""
    places, kept, problems = list[Place](), list[StoredRow](), list[Problem]()
    for place, row in rows:
        if isinstance(row, Fault):
            problems.append(Problem(KEY, row.message, where=str(place)))
        else:
            places.append(place)
            kept.append(row)
    found = []
    for place, one in zip(places, encode(kept), strict=True):
        if isinstance(one, str):
            problems.append(Problem(KEY, one, where=str(place)))
        else:
            found.append(one)
    if problems:
        raise RequestError(problems[:PROBLEM_LIMIT])
    if not found:
        raise RequestError([Problem(KEY, f"{path} has no rows")])
    return found


def _asking(name: RowFormat, column: str) -> Format:
    """The format with the prompt's column as the only required one."""
    row_format = FORMATS[name]
    return replace(row_format, needs=(column,), also=tuple(other for other in row_format.columns if other != column))


def _need(row_format: Format, columns: Sequence[str], source: DatasetParams) -> Format:
    missing = row_format.missing(columns, source.columns)
    if missing:
        message = f"there is no column `{missing[0]}`; the columns are: {', '.join(columns) or 'none'}"
        raise RequestError([Problem(KEY, message, nearest=nearest(missing[0], columns))])
    return row_format


def _fitted(row: Encoded, config: TrainingConfig) -> Encoded | str:
    """The row, truncated as in training, or a message if it is too long."""
    limit, policy = config.model.model_max_length, config.data.truncation
    assert isinstance(limit, int), "the config is resolved"
    if row_length(row) <= limit:
        return row
    if policy in (Truncation.LEFT, Truncation.RIGHT):
        return truncate(row, limit, policy) or row
    return f"the row has {counted(row_length(row), 'token')} and the limit is {limit} (data.truncation: {policy})"


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RequestError if the tokenizer has no chat template, for rows that are chats."""
    if not has_template(tokenizer):
        message = "the rows are chats and the tokenizer has no chat template"
        expected = "rows with `prompt` or `text`, or a chat_template.jinja in the model's folder"
        raise RequestError([Problem(KEY, message, expected=expected)])


def encode_prompt(row: StoredRow, tokenizer: PreTrainedTokenizerBase, most: int | None) -> Encoded | str:
    """The prompt of a stored row, of at most `most` tokens; or a message if there is none."""
    asked: Any = row_question(row, tokenizer)
    if asked is None:
        return "there is no prompt"
    if isinstance(asked, Chat):
        _require_template(tokenizer)
        try:
            ids = tokenizer(render(tokenizer, asked, generation_prompt=True), add_special_tokens=False)["input_ids"]
        except TemplateFault as fault:
            return f"the chat template does not render it: {fault}"
    elif isinstance(asked, str):
        ids = tokenizer(asked.removeprefix(own_start(tokenizer)), verbose=False)["input_ids"]
        ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and len(ids) > 1 else ids
    else:
        ids = list(asked)
    if not ids:
        return "there is no prompt"
    if most is not None and len(ids) > most:
        return f"the prompt has {counted(len(ids), 'token')}, and with the new tokens the model can take {most}"
    tokens = np.array(ids, np.int32)
    return Encoded(tokens, np.full(len(tokens), IGNORED, np.int32))


_PAIRED = (RowFormat.PREFERENCE, RowFormat.UNPAIRED)


def encode_sample_prompts(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, row_format: RowFormat
) -> tuple[tuple[int, ...], ...]:
    """Tokens of each sample prompt, in the format of the training rows: a user's turn for chats, else an instruction, a
    prompt or a text. Raises RequestError for prompts that with a completion exceed `model.model_max_length`."""
    training, limit = config.training, config.model.model_max_length
    assert isinstance(limit, int), "the config is resolved"
    most, found, problems = limit - training.sample_new_tokens, list[tuple[int, ...]](), list[Problem]()
    for index, text in enumerate(training.sample_prompts):
        row = _row(text, row_format, tokenizer)
        encoded = row if isinstance(row, str) else encode_prompt(row, tokenizer, None)
        key = f"training.sample_prompts[{index}]"
        if isinstance(encoded, str):
            problems.append(Problem(key, encoded, expected="a text"))
        elif len(encoded.input_ids) > most:
            tokens, new = len(encoded.input_ids), training.sample_new_tokens
            message = f"has {tokens} tokens, and with {new} new ones more than {limit}"
            expected = "a shorter prompt, fewer training.sample_new_tokens, or a higher model.model_max_length"
            problems.append(Problem(key, message, expected=expected))
        else:
            found.append(tuple(encoded.input_ids.tolist()))
    if problems:
        raise RequestError(problems)
    return tuple(found)


def _row(text: str, row_format: RowFormat, tokenizer: PreTrainedTokenizerBase) -> StoredRow | str:
    """The prompt as a stored row of the format, or a message if it cannot be one."""
    if row_format in _PAIRED:
        row_format = RowFormat.MESSAGES if has_template(tokenizer) else RowFormat.PROMPT_COMPLETION
    asked: Any = text
    if row_format is RowFormat.MESSAGES:
        asked = [{"role": "user", "content": text}]
    elif row_format is RowFormat.SHAREGPT:
        asked = [{"from": "human", "value": text}]
    elif row_format is RowFormat.TOKENS:
        row_format = RowFormat.TEXT
    return FORMATS[row_format].read({**dict.fromkeys(FORMATS[row_format].columns), ASKING[row_format]: asked})

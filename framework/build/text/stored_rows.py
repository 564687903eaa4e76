"""Stored rows of any format: their tokens, and their prompts for checks and generation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from framework.build.text.chat import ROWS_CHECKED, Chat, check_chat
from framework.build.text.encode import Encoding, Result, StoredRow
from framework.build.text.format_table import FORMATS
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat


def encode_batch(batch: Mapping[str, Sequence[Any]], encoding: Encoding) -> list[Result]:
    """Encode a batch of stored rows, in order."""
    found: list[Result] = [None] * len(batch["form"])
    for row_format in set(batch["form"]):
        indices = [index for index, own in enumerate(batch["form"]) if own == row_format]
        rows = [{column: values[index] for column, values in batch.items()} for index in indices]
        full = [(index, row) for index, row in zip(indices, rows, strict=True) if not _is_empty(row)]
        results = FORMATS[RowFormat(row_format)].encode([row for _, row in full], encoding)
        for (index, _), result in zip(full, results, strict=True):
            found[index] = result
    return found


def row_prompt(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | tuple[str, str] | None:
    """The row as a conversation, or as prompt and completion; of a pair, with the better answer.

    None if the row has no prompt or is empty.
    """
    prompt = FORMATS[RowFormat(row["form"])].prompt
    return None if prompt is None or _is_empty(row) else prompt(row, tokenizer)


def row_question(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | Sequence[int] | None:
    """The row's prompt for generation, without an answer: a chat, a text or tokens; None if it has none."""
    return FORMATS[RowFormat(row["form"])].question(row, tokenizer)


_BLANK = ("[]", '""')
"""JSON texts of empty supervised values."""


def _is_empty(row: StoredRow) -> bool:
    needed = FORMATS[RowFormat(row["form"])].filled
    if any(row.get(column) is None for column in needed):
        return True
    supervised = [row[column] for column in needed if column not in ("prompt", "label")]
    return any(not len(value) or (isinstance(value, str) and value in _BLANK) for value in supervised)


class Rows(Protocol):
    """Stored rows of one format."""

    @property
    def row_format(self) -> RowFormat: ...
    @property
    def dataset(self) -> Iterable[dict[str, Any]]: ...


def check_prompts(sources: Sequence[Rows], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Warnings about the first rows with a prompt of each source.

    Raises RequestError if they are chats and there is no template, or one that does not render them, and if the
    tokenizer gives no character offsets, which are needed to find answers.
    """
    needy = [source.row_format for source in sources if source.row_format not in (RowFormat.TEXT, RowFormat.TOKENS)]
    if needy and not tokenizer.is_fast:
        message = f"{type(tokenizer).__name__} gives no character offsets of tokens, which `{needy[0]}` rows need"
        raise RequestError([Problem("model.tokenizer_name", message, expected="a tokenizer with a tokenizer.json")])
    of_chats, of_texts = dict[str, str](), dict[str, None]()
    for source in sources:
        if FORMATS[source.row_format].prompt is None:
            continue
        prompts = (row_prompt(row, tokenizer) for row in source.dataset)
        first = list(islice((prompt for prompt in prompts if prompt is not None), ROWS_CHECKED))
        chats = [prompt for prompt in first if isinstance(prompt, Chat)]
        if chats:
            of_chats = {**check_chat(tokenizer, chats), **of_chats}
        texts = (prompt for prompt in first if not isinstance(prompt, Chat))
        of_texts.update(dict.fromkeys(islice(_joined(tokenizer, texts), 1)))
    return (*of_chats.values(), *of_texts)


def _joined(tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Warnings about a token that spans the end of a prompt and the beginning of its completion."""
    for prompt, completion in texts:
        batch = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
        for start, end in batch["offset_mapping"]:
            if start < len(prompt) < end:
                token = (prompt + completion)[start:end]
                yield (
                    f"the end of a prompt and the beginning of its completion are one token, {token!r}; generation, "
                    "which starts from the prompt alone, cannot produce it: let completions begin with the space"
                )

"""Rows as they are kept, of whichever format, as tokens, prompts and questions."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from framework.build.text.chat import Chat
from framework.build.text.encode import Encoding, Result, StoredRow
from framework.build.text.format_table import FORMS
from framework.schema.choices import RowFormat


def encode_batch(batch: Mapping[str, Sequence[Any]], encoding: Encoding) -> list[Result]:
    """The rows of a batch in order."""
    found: list[Result] = [None] * len(batch["form"])
    for form in set(batch["form"]):
        indices = [index for index, own in enumerate(batch["form"]) if own == form]
        rows = [{column: values[index] for column, values in batch.items()} for index in indices]
        full = [(index, row) for index, row in zip(indices, rows, strict=True) if not _is_empty(row)]
        results = FORMS[RowFormat(form)].encode([row for _, row in full], encoding)
        for (index, _), result in zip(full, results, strict=True):
            found[index] = result
    return found


def row_prompt(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | tuple[str, str] | None:
    """The conversation that the row is rendered as, or its prompt and completion; of a pair, with the better answer.

    None where the row has no prompt, or nothing in it.
    """
    prompt = FORMS[RowFormat(row["form"])].prompt
    return None if prompt is None or _is_empty(row) else prompt(row, tokenizer)


def row_question(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | Sequence[int] | None:
    """What the row asks a model to go on from: a chat up to the answer, a text, or tokens; None where nothing is asked.

    The answer next to it, where there is one, is left out.
    """
    return FORMS[RowFormat(row["form"])].question(row, tokenizer)


_BLANK = ("[]", '""')
"""Texts in place of supervised values that are there and hold nothing."""


def _is_empty(row: StoredRow) -> bool:
    needed = FORMS[RowFormat(row["form"])].filled
    if any(row.get(column) is None for column in needed):
        return True
    learnt = [row[column] for column in needed if column not in ("prompt", "label")]
    return any(not len(value) or (isinstance(value, str) and value in _BLANK) for value in learnt)

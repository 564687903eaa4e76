"""The tokens that a model learns to end its answers with, where generation has to stop."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from framework.build.data.packing import Packs
from framework.build.data.rows import Rows

ROWS_LOOKED_AT = 64
"""Rows that show how answers end: a template ends all of them alike, and some are cut."""


def supervised_ends(rows: Rows | Packs, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the special tokens that are the last to be learnt in the first rows."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    labels = (rows[index]["labels"] for index in range(min(len(rows), ROWS_LOOKED_AT)))
    last = {next((label for label in reversed(row) if label >= 0), None) for row in labels}
    return sorted(number for number in last if number in special and number is not None)


def stop_at(model: PreTrainedModel, ends: Sequence[int]) -> None:
    """Have generation stop at these tokens besides those that the model knows; what is exported says so."""
    if not (ends and model.can_generate()):
        return
    known = model.generation_config.eos_token_id
    listed = known if isinstance(known, list) else [] if known is None else [known]
    if new := [end for end in ends if end not in listed]:
        model.generation_config.eos_token_id = [*listed, *new]

"""`training.sample_prompts` as tokens: asked in the form that the training rows ask in."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from framework.build.data.prediction_rows import ASKING, encode_prompt
from framework.build.text.chat import has_template
from framework.build.text.encode import StoredRow
from framework.build.text.format_table import FORMS
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat
from framework.schema.config import TrainingConfig

_PAIRED = (RowFormat.PREFERENCE, RowFormat.UNPAIRED)


def encode_sample_prompts(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, form: RowFormat
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each prompt: a user's turn where rows are chats, else an instruction, a prompt or a text, as the
    rows have it. Raises RequestError for those that leave no room for a completion within `model.model_max_length`."""
    training, limit = config.training, config.model.model_max_length
    assert isinstance(limit, int), "the config is resolved"
    most, found, problems = limit - training.sample_new_tokens, list[tuple[int, ...]](), list[Problem]()
    for index, text in enumerate(training.sample_prompts):
        row = _row(text, form, tokenizer)
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


def _row(text: str, form: RowFormat, tokenizer: PreTrainedTokenizerBase) -> StoredRow | str:
    """The prompt as a row of the form is stored, or why it is none."""
    if form in _PAIRED:
        form = RowFormat.MESSAGES if has_template(tokenizer) else RowFormat.PROMPT_COMPLETION
    asked: Any = text
    if form is RowFormat.MESSAGES:
        asked = [{"role": "user", "content": text}]
    elif form is RowFormat.SHAREGPT:
        asked = [{"from": "human", "value": text}]
    elif form is RowFormat.TOKENS:
        form = RowFormat.TEXT
    return FORMS[form].read({**dict.fromkeys(FORMS[form].columns), ASKING[form]: asked})

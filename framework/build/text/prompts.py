"""Whether the supervised tokens begin where generation will, seen on the first rows of each source."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from framework.build.text.chat import ROWS_CHECKED, Chat, check_chat
from framework.build.text.format_table import FORMS
from framework.build.text.stored_rows import row_prompt
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat


class Rows(Protocol):
    """Rows as a form keeps them."""

    @property
    def form(self) -> RowFormat: ...
    @property
    def dataset(self) -> Iterable[dict[str, Any]]: ...


def check_prompts(sources: Sequence[Rows], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Warnings about the first rows of each source that have a prompt.

    Raises RequestError when they are chats and there is no template, or one that does not render them; and when the
    tokenizer does not say which characters a token has, by which answers are found.
    """
    needy = [source.form for source in sources if source.form not in (RowFormat.TEXT, RowFormat.TOKENS)]
    if needy and not tokenizer.is_fast:
        message = f"{type(tokenizer).__name__} does not say which characters a token has, which `{needy[0]}` rows need"
        raise RequestError([Problem("model.tokenizer_name", message, expected="a tokenizer with a tokenizer.json")])
    warnings: dict[str, None] = {}
    for source in sources:
        if FORMS[source.form].prompt is None:
            continue
        prompts = (row_prompt(row, tokenizer) for row in source.dataset)
        first = list(islice((prompt for prompt in prompts if prompt is not None), ROWS_CHECKED))
        chats = [prompt for prompt in first if isinstance(prompt, Chat)]
        if chats:
            warnings.update(dict.fromkeys(check_chat(tokenizer, chats)))
        texts = (prompt for prompt in first if not isinstance(prompt, Chat))
        warnings.update(dict.fromkeys(islice(_joined(tokenizer, texts), 1)))
    return tuple(warnings)


def _joined(tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Where the end of a prompt and the beginning of its completion are one token, which generation cannot write."""
    for prompt, completion in texts:
        batch = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
        for start, end in batch["offset_mapping"]:
            if start < len(prompt) < end:
                token = (prompt + completion)[start:end]
                yield (
                    f"the end of a prompt and the beginning of its completion are one token, {token!r}; generation, "
                    "which is given the prompt alone, cannot write it: let completions begin with the space"
                )

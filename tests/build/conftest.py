"""A small tokenizer with any special tokens and template, made in milliseconds; and files of rows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.text.tokenizer import train_tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog. What is two and two? It is four.\n"] * 3

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]


@pytest.fixture
def make_tokenizer() -> MakeTokenizer:
    def make(template: str | None = None, specials: Sequence[str] = ()) -> PreTrainedTokenizerFast:
        tokenizer = train_tokenizer(CORPUS, vocab_size=320)
        tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
        if template is not None:
            tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(name: str, rows: Sequence[Any]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write

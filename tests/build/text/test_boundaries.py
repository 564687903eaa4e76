"""Rows whose text begins with the start token, or ends with the end token, have one of each."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from framework.build.text.labels import encode_completions, encode_labelled, encode_texts

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(params=[True, False])
def tokenizer(make_tokenizer: MakeTokenizer, request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """One that puts its start token before each text, and one that puts nothing."""
    made = make_tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if request.param:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("text", ["<s>two</s>", "<s>two", "<s>two</s>\n", "<s>two</s> \n\n"])
def test_texts(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    (row,) = encode_texts(tokenizer, [text])
    assert row.input_ids.tolist() == ids(tokenizer, "<s>two</s>")


def test_a_line_break_without_an_end_token_stays(tokenizer: PreTrainedTokenizerFast) -> None:
    (row,) = encode_texts(tokenizer, ["two\n"])
    assert row.input_ids.tolist()[-len(ids(tokenizer, "two\n</s>")) :] == ids(tokenizer, "two\n</s>")


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("<s>What? ", "Four."), ("<s>What? ", "Four.</s>"), ("<s>What? ", "Four.</s>\n"), ("", "<s>What? Four.</s>\n")],
)
def test_completions(prompt: str, completion: str, tokenizer: PreTrainedTokenizerFast) -> None:
    (row,) = encode_completions(tokenizer, [(prompt, completion)])
    assert row.input_ids.tolist() == ids(tokenizer, "<s>What? Four.</s>")
    answer = ids(tokenizer, "Four.</s>") if prompt else row.input_ids.tolist()[1:]
    assert row.labels.tolist() == [-100] * (len(row.input_ids) - len(answer)) + answer


@pytest.mark.parametrize("text", ["<s>two", "<s>two</s>"])
def test_labelled(text: str, make_tokenizer: MakeTokenizer) -> None:
    made: Any = make_tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", made.bos_token_id), ("</s>", made.eos_token_id)],
    )
    (row,) = encode_labelled(made, [(text, None)])
    assert row.input_ids.tolist() == ids(made, "<s>two</s>")
    (pair,) = encode_labelled(made, [(text, "four</s>")])
    assert pair.input_ids.tolist() == ids(made, "<s>two</s>four</s>")

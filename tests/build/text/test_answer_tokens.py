"""Tokens of answers are those that share a character with one, whatever kind of tokenizer cuts the text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from framework.build.text.chat import Chat
from framework.build.text.labels import IGNORED, Encoded, encode_chats
from framework.build.text.named_templates import read_template

TEXTS = (
    "A long sentence, with  spaces\tand\n\nlines. ",
    "漢字 🦊 naïve e\u0301te\u0301 — ½",
    "",
    " x ",
    "<|im_end|>ok",
    "fox " * 40,
)
ENDS = ["<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Characters of several bytes become several tokens; spaces of a token are left out of its characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=ENDS))


def unigram() -> Tokenizer:
    """A mark of a word's beginning is put in, and unknown characters are one token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(
        tokenizer, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>", *ENDS])
    )


def word_piece() -> Tokenizer:
    """Spaces are no part of any token, and accents are taken away first."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", *ENDS]))


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    trainer.show_progress = False
    tokenizer.train_from_iterator([text for text in TEXTS if "🦊" not in text], trainer)
    return tokenizer


def chats() -> list[Chat]:
    return [
        Chat([{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, four, strict=True)])
        for four in zip(TEXTS, TEXTS[1:] + TEXTS[:1], TEXTS[2:] + TEXTS[:2], TEXTS[3:] + TEXTS[:3], strict=True)
    ]


def ready(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=ENDS)
    made.chat_template = read_template("chatml")
    return made


def by_characters(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> tuple[list[int], list[int]]:
    """Ids, and labels as the characters of every token say them. ChatML has each answer between fixed words."""
    text, spans = "", []
    for message in chat.messages:
        text += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"]) + len("<|im_end|>")))
        text += f"{message['content']}<|im_end|>\n"
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    supervised = [any(end > s and start < e for s, e in spans) for start, end in batch["offset_mapping"]]
    ids = batch["input_ids"]
    labels = [token if taken else IGNORED for token, taken in zip(ids, supervised, strict=True)]
    return ids, [IGNORED, *labels[1:]]


@pytest.mark.parametrize("kind", [byte_level, unigram, word_piece])
def test_each_token_that_shares_a_character_with_an_answer(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = ready(kind())
    for chat, row in zip(chats(), encode_chats(tokenizer, chats()), strict=True):
        assert isinstance(row, Encoded), row
        ids, labels = by_characters(tokenizer, chat)
        assert row.input_ids.tolist() == ids
        assert row.labels.tolist() == labels
        assert row.input_ids.dtype == row.labels.dtype == np.int32


def test_what_the_tokenizer_was_set_to_cut_and_fill_is_not_done_to_rows() -> None:
    tokenizer = ready(byte_level())
    expected = encode_chats(tokenizer, chats())
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=900)
    for one, other in zip(expected, encode_chats(tokenizer, chats()), strict=True):
        assert isinstance(one, Encoded)
        assert isinstance(other, Encoded)
        assert one.input_ids.tolist() == other.input_ids.tolist()


def test_a_tokenizer_with_a_call_of_its_own_is_called() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus([each.upper() for each in text], *args, **kwargs)

    tokenizer = Shouting(tokenizer_object=byte_level(), additional_special_tokens=ENDS)
    tokenizer.chat_template = read_template("chatml")
    for row in encode_chats(tokenizer, chats()):
        assert isinstance(row, Encoded), row
        assert "USER" in "".join(tokenizer.convert_ids_to_tokens(row.input_ids.tolist()))

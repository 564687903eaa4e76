"""Rows of any form, as tokens with their labels."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from framework.build.text.chat import Chat, Message, has_template
from framework.build.text.classes import Targets, WrongLabel
from framework.build.text.labels import (
    Encoded,
    UnsuitedChat,
    encode_chats,
    encode_completions,
    encode_labelled,
    encode_texts,
    encode_tokens,
)
from framework.build.text.messages import SUPERVISED
from framework.schema.choices import Supervise

Result: TypeAlias = Encoded | UnsuitedChat | None
"""A row as tokens, why it cannot be had, or None where the row is empty."""

StoredRow: TypeAlias = dict[str, Any]
"""A row as a form keeps it, by column."""

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
"""How the prompts of Stanford's Alpaca begin (2023); what tokenizers without a chat template are given."""


@dataclass(frozen=True)
class Encoding:
    """How rows become tokens."""

    tokenizer: PreTrainedTokenizerBase
    learnt: Supervise | None = None
    """Which tokens; None is what each form is for: the answers of a chat, the completion of a prompt."""
    targets: Targets | None = None
    """How labels become numbers, where rows have them."""
    margins: bool = False
    """Whether pairs say by how much the one answer is better."""

    def supervised_of(self, usual: Supervise) -> Supervise:
        return self.learnt or usual


def row_texts(batch: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Every text in these rows, for building a tokenizer on."""
    for values in zip(*batch.values(), strict=True):
        row = dict(zip(batch, values, strict=True))
        yield from (row[column] for column in ("text", "text_pair") if row.get(column))
        for column in ("messages", "prompt", "completion", "chosen", "rejected"):
            if row.get(column):
                yield from _texts_in(json.loads(row[column]))


def asked_tokens(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Sequence[int] | None:
    """The tokens of a row, where it has any."""
    return row["input_ids"] if row["input_ids"] is not None and len(row["input_ids"]) else None


def asked_text(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text to go on with."""
    return row["text"] or None


def asked_conversation(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | None:
    """The conversation without the answer that it ends in."""
    if row["messages"] is None:
        return None
    chat = conversation(row)
    last = len(chat.messages) - 1
    return chat.through(last) if last in chat.answers() and last else chat


def asked_alpaca(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | None:
    """The instruction with its input, as a chat or as Alpaca's text."""
    if row["prompt"] is None:
        return None
    asked = alpaca({**row, "completion": '""'}, tokenizer)
    return asked.through(asked.prompt) if isinstance(asked, Chat) else asked[0]


def asked_prompt(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | None:
    """The prompt, a text or a chat."""
    if row["prompt"] is None:
        return None
    prompt = json.loads(row["prompt"])
    return prompt if isinstance(prompt, str) else _chat(prompt, row)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        texts = [
            value[name] for name in ("content", "instruction", "input", "system", "reasoning_content") if name in value
        ]
        yield from (text for text in texts if text)
        yield from _texts_in(value.get("history", []))
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(each)


def texts(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Texts, of which every token is supervised."""
    return list(encode_texts(encoding.tokenizer, [row["text"] for row in rows])) if rows else []


def conversations(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Chats, of which the answers are supervised unless `data.supervise` says otherwise."""
    learnt = encoding.supervised_of(Supervise.ASSISTANT)
    return list(encode_chats(encoding.tokenizer, [conversation(row) for row in rows], learnt))


def alpacas(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Instructions with their answers, as chats or as Alpaca's texts."""
    return _answers([alpaca(row, encoding.tokenizer) for row in rows], encoding)


def completions(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Prompts with their completions."""
    return _answers([answered(row) for row in rows], encoding)


def preferences(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Pairs: the better answer, with the other and the margin next to it."""
    chosen, rejected = (
        _answers([answered(row, column=column) for row in rows], encoding) for column in ("chosen", "rejected")
    )
    written = (np.array([json.loads(row.get("margin") or "0")], np.float32) for row in rows)
    margins = [margin if encoding.margins else None for margin in written]
    return [
        replace(one, rejected=other, target=margin)
        if isinstance(one, Encoded) and isinstance(other, Encoded)
        else one
        if isinstance(one, UnsuitedChat)
        else other
        for one, other, margin in zip(chosen, rejected, margins, strict=True)
    ]


def unpaired(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Answers with a verdict."""
    found = completions(rows, encoding)
    verdicts = (np.array([json.loads(row["label"])], np.float32) for row in rows)
    return [
        replace(one, target=verdict) if isinstance(one, Encoded) else one
        for one, verdict in zip(found, verdicts, strict=True)
    ]


def labelled(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Texts with their class or number. Raises TypeError where the encoding does not say what labels mean."""
    if encoding.targets is None:
        raise TypeError("labelled rows are encoded with what their labels mean")
    found: list[Result] = []
    encoded = encode_labelled(encoding.tokenizer, [(row["text"], row.get("text_pair")) for row in rows])
    for row, one in zip(rows, encoded, strict=True):
        try:
            found.append(replace(one, target=encoding.targets.of(json.loads(row["label"]))))
        except WrongLabel as wrong:
            found.append(UnsuitedChat(f"column `label`: {wrong}"))
    return found


def tokens(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Rows of tokens, with the labels that they bring."""
    return [encode_tokens(row["input_ids"], row.get("labels")) for row in rows]


def _answers(rows: Sequence[Chat | tuple[str, str]], encoding: Encoding) -> list[Result]:
    """Prompts with their completions, as chats or as plain texts; each row by itself decides which."""
    learnt = encoding.supervised_of(Supervise.COMPLETION)
    chats = [row for row in rows if isinstance(row, Chat)]
    texts = [row for row in rows if not isinstance(row, Chat)]
    from_chats = iter(encode_chats(encoding.tokenizer, chats, learnt) if chats else ())
    from_texts = iter(encode_completions(encoding.tokenizer, texts, learnt is Supervise.ALL))
    return [next(from_chats) if isinstance(row, Chat) else next(from_texts) for row in rows]


def conversation(row: StoredRow, tokenizer: PreTrainedTokenizerBase | None = None) -> Chat:
    """The row as a chat, whose messages were written out."""
    return _chat(json.loads(row["messages"]), row)


def _chat(messages: Sequence[Message], row: StoredRow, prompt: int = 0) -> Chat:
    """The conversation with the tools of the row; which turns are supervised is no part of what templates are given."""
    said = {index: message[SUPERVISED] for index, message in enumerate(messages) if SUPERVISED in message}
    if said:
        messages = [{name: value for name, value in each.items() if name != SUPERVISED} for each in messages]
    left_out = frozenset(index for index, is_supervised in said.items() if not is_supervised)
    tools = json.loads(row["tools"]) if row.get("tools") else ()
    return Chat(messages, tools, prompt, left_out, any(said.values()))


def answered(
    row: StoredRow, tokenizer: PreTrainedTokenizerBase | None = None, *, column: str = "completion"
) -> Chat | tuple[str, str]:
    """Prompt and answer, as a chat where the answer is one."""
    prompt, answer = json.loads(row["prompt"] or '""'), json.loads(row[column])
    if isinstance(answer, str):
        return (prompt, answer)
    prompt = prompt or []
    return _chat([*prompt, *answer], row, len(prompt))


def alpaca(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | tuple[str, str]:
    """A conversation where there is a template, or where there are earlier turns, which need one; else a text."""
    asked = json.loads(row["prompt"])
    is_chat = has_template(tokenizer) or asked.get("history")
    return _alpaca_chat(asked, row) if is_chat else _alpaca_text(asked, row)


def _alpaca_chat(asked: dict[str, Any], row: StoredRow) -> Chat:
    question = asked["instruction"] + (f"\n{asked['input']}" if asked["input"] else "")
    system = [{"role": "system", "content": asked["system"]}] if asked["system"] else []
    turns = [text for pair in asked.get("history", []) for text in pair] + [question, json.loads(row["completion"])]
    roles = ("user", "assistant") * (len(turns) // 2)
    messages = [*system, *({"role": role, "content": text} for role, text in zip(roles, turns, strict=True))]
    return Chat(messages, prompt=len(messages) - 1)


def _alpaca_text(asked: dict[str, Any], row: StoredRow) -> tuple[str, str]:
    start = asked["system"] or (ALPACA_WITH_INPUT if asked["input"] else ALPACA_WITHOUT_INPUT)
    middle = f"\n\n### Input:\n{asked['input']}" if asked["input"] else ""
    prompt = f"{start}\n\n### Instruction:\n{asked['instruction']}{middle}\n\n### Response:\n"
    return prompt, json.loads(row["completion"])

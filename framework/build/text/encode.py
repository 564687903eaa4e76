"""Encoders of the row formats: stored rows to tokens and labels."""

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
"""A row's tokens, the reason why it cannot be encoded, or None for an empty row."""

StoredRow: TypeAlias = dict[str, Any]
"""A stored row: values by column."""

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
"""First sentences of Stanford Alpaca's prompts (2023), for tokenizers without a chat template."""


@dataclass(frozen=True)
class Encoding:
    """Settings for encoding rows."""

    tokenizer: PreTrainedTokenizerBase
    supervise: Supervise | None = None
    """Which tokens are supervised; None is the format's default: the answers of a chat, the completion of a prompt."""
    targets: Targets | None = None
    """Conversion of labels to numbers, for rows with labels."""
    margins: bool = False
    """Whether pairs have a margin."""

    def supervised_of(self, usual: Supervise) -> Supervise:
        return self.supervise or usual


def row_texts(batch: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """All texts in these rows, for training a tokenizer."""
    for values in zip(*batch.values(), strict=True):
        row = dict(zip(batch, values, strict=True))
        yield from (row[column] for column in ("text", "text_pair") if row.get(column))
        for column in ("messages", "prompt", "completion", "chosen", "rejected"):
            if row.get(column):
                yield from _texts_in(json.loads(row[column]))


def asked_tokens(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Sequence[int] | None:
    """Generation prompt of a row of tokens."""
    return row["input_ids"] if row["input_ids"] is not None and len(row["input_ids"]) else None


def asked_text(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Generation prompt of a text: the text itself."""
    return row["text"] or None


def asked_conversation(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | None:
    """Generation prompt of a conversation: its messages without a final answer."""
    if row["messages"] is None:
        return None
    chat = conversation(row)
    last = len(chat.messages) - 1
    return chat.through(last) if last in chat.answers() and last else chat


def asked_alpaca(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | None:
    """Generation prompt of an Alpaca row: the instruction with its input, as a chat or as Alpaca's text."""
    if row["prompt"] is None:
        return None
    asked = alpaca({**row, "completion": '""'}, tokenizer)
    return asked.through(asked.prompt) if isinstance(asked, Chat) else asked[0]


def asked_prompt(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | str | None:
    """Generation prompt of a row with a `prompt`, a text or a chat."""
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
    """Encode texts, with every token supervised."""
    return list(encode_texts(encoding.tokenizer, [row["text"] for row in rows])) if rows else []


def conversations(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode chats, whose answers are supervised by default."""
    supervise = encoding.supervised_of(Supervise.ASSISTANT)
    return list(encode_chats(encoding.tokenizer, [conversation(row) for row in rows], supervise))


def alpacas(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode instructions and their answers, as chats or as Alpaca's texts."""
    return _answers([alpaca(row, encoding.tokenizer) for row in rows], encoding)


def completions(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode prompts and their completions."""
    return _answers([answered(row) for row in rows], encoding)


def preferences(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode pairs: the better answer, which carries the worse one and the margin."""
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
    """Encode answers with a verdict."""
    found = completions(rows, encoding)
    verdicts = (np.array([json.loads(row["label"])], np.float32) for row in rows)
    return [
        replace(one, target=verdict) if isinstance(one, Encoded) else one
        for one, verdict in zip(found, verdicts, strict=True)
    ]


def labelled(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode texts with their class or number. Raises TypeError if `encoding.targets` is not set."""
    if encoding.targets is None:
        raise TypeError("encoding labelled rows needs `targets`")
    found: list[Result] = []
    encoded = encode_labelled(encoding.tokenizer, [(row["text"], row.get("text_pair")) for row in rows])
    for row, one in zip(rows, encoded, strict=True):
        try:
            found.append(replace(one, target=encoding.targets.of(json.loads(row["label"]))))
        except WrongLabel as wrong:
            found.append(UnsuitedChat(f"column `label`: {wrong}"))
    return found


def tokens(rows: Sequence[StoredRow], encoding: Encoding) -> list[Result]:
    """Encode rows of token ids, with their own labels if they have any."""
    return [encode_tokens(row["input_ids"], row.get("labels")) for row in rows]


def _answers(rows: Sequence[Chat | tuple[str, str]], encoding: Encoding) -> list[Result]:
    """Encode prompts with their completions; each row is a chat or plain text."""
    supervise = encoding.supervised_of(Supervise.COMPLETION)
    chats = [row for row in rows if isinstance(row, Chat)]
    texts = [row for row in rows if not isinstance(row, Chat)]
    from_chats = iter(encode_chats(encoding.tokenizer, chats, supervise) if chats else ())
    from_texts = iter(encode_completions(encoding.tokenizer, texts, supervise is Supervise.ALL))
    return [next(from_chats) if isinstance(row, Chat) else next(from_texts) for row in rows]


def conversation(row: StoredRow, tokenizer: PreTrainedTokenizerBase | None = None) -> Chat:
    """A stored conversation as a chat."""
    return _chat(json.loads(row["messages"]), row)


def _chat(messages: Sequence[Message], row: StoredRow, prompt: int = 0) -> Chat:
    """The conversation with the row's tools. The marks of supervised turns are removed from the messages that templates
    get."""
    marks = {index: message[SUPERVISED] for index, message in enumerate(messages) if SUPERVISED in message}
    if marks:
        messages = [{name: value for name, value in each.items() if name != SUPERVISED} for each in messages]
    left_out = frozenset(index for index, is_supervised in marks.items() if not is_supervised)
    tools = json.loads(row["tools"]) if row.get("tools") else ()
    return Chat(messages, tools, prompt, left_out, any(marks.values()))


def answered(
    row: StoredRow, tokenizer: PreTrainedTokenizerBase | None = None, *, column: str = "completion"
) -> Chat | tuple[str, str]:
    """Prompt and answer, as a chat if the answer is messages."""
    prompt, answer = json.loads(row["prompt"] or '""'), json.loads(row[column])
    if isinstance(answer, str):
        return (prompt, answer)
    prompt = prompt or []
    return _chat([*prompt, *answer], row, len(prompt))


def alpaca(row: StoredRow, tokenizer: PreTrainedTokenizerBase) -> Chat | tuple[str, str]:
    """An Alpaca row as a conversation if there is a template or history (which needs a template), else as text."""
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

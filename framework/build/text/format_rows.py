"""Readers of the row formats: a record to a stored row, or a message about its mistake."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from framework.build.text.classes import HIGHEST
from framework.build.text.labels import IGNORED
from framework.build.text.messages import (
    Fault,
    describe,
    read_functions,
    read_history,
    read_messages,
    read_sharegpt,
    read_text,
    read_tools,
    read_turns,
    shared_messages,
    stored,
    with_system,
)
from framework.schema.choices import RowFormat
from framework.schema.plural import counted

Values = dict[str, Any]
"""A stored row: values by column."""

HIGHEST_ID = 2**31 - 1

T = TypeVar("T")


def faults_as_values(read: Callable[[Mapping[str, Any]], Values]) -> Callable[[Mapping[str, Any]], Values | str]:
    """`read` with a Fault returned as text instead of raised, since a reader of many rows collects all of them."""

    def guarded(record: Mapping[str, Any]) -> Values | str:
        try:
            return read(record)
        except Fault as fault:
            return str(fault)
        except RecursionError:
            return "its values are nested too deeply"

    return guarded


def _optional(column: str, read: Callable[[object], T], record: Mapping[str, Any]) -> T | None:
    try:
        return None if record[column] is None else read(record[column])
    except Fault as fault:
        raise Fault(f"column `{column}`: {fault}") from None


def _answer(column: str, read: Callable[[object], T], record: Mapping[str, Any]) -> T | None:
    """`_optional` for the column of an answer, where an empty field of a table means no answer."""
    value = record[column]
    return None if isinstance(value, str) and not value.strip() else _optional(column, read, record)


def _some_text(column: str, record: Mapping[str, Any]) -> str:
    return _optional(column, read_text, record) or ""


def _text_or_messages(value: object) -> str | list[dict[str, Any]]:
    return read_turns(value) if isinstance(value, (list, dict)) else read_text(value)


def _tools(record: Mapping[str, Any]) -> str | None:
    tools = _optional("tools", read_tools, record)
    functions = _optional("functions", read_functions, record)
    if tools and functions:
        raise Fault("columns `tools` and `functions` both have tools")
    return stored(tools or functions) if tools or functions else None


def text_row(record: Mapping[str, Any]) -> Values:
    """Stored row of `text`."""
    return {"form": str(RowFormat.TEXT), "text": _optional("text", read_text, record)}


def messages_row(record: Mapping[str, Any]) -> Values:
    """Stored row of `messages`."""
    return _conversation(RowFormat.MESSAGES, _optional("messages", read_messages, record), record)


def sharegpt_row(record: Mapping[str, Any]) -> Values:
    """Stored row of `conversations`, as messages."""
    return _conversation(RowFormat.SHAREGPT, _optional("conversations", read_sharegpt, record), record)


def _conversation(row_format: RowFormat, messages: list[dict[str, Any]] | None, record: Mapping[str, Any]) -> Values:
    messages = with_system(_some_text("system", record), messages) if messages else None
    return {"form": str(row_format), "messages": stored(messages) if messages else None, "tools": _tools(record)}


def prompt_completion_row(record: Mapping[str, Any]) -> Values:
    """Stored row of a prompt and its completion, each a text or messages."""
    prompt = _optional("prompt", _text_or_messages, record)
    completion = _optional("completion", _text_or_messages, record)
    prompt, completion = _alike(prompt, completion)
    prompt = _behind_system(prompt, record, "messages, or columns: {instruction: prompt, output: completion}")
    kept = {"prompt": _stored(prompt), "completion": _stored(completion), "tools": _tools(record)}
    return {"form": str(RowFormat.PROMPT_COMPLETION), **kept}


def _behind_system(prompt: Any, record: Mapping[str, Any], instead: str) -> Any:
    """The prompt with the `system` column as its first message. Raises Fault if the prompt is a text, which has no
    turns."""
    system = _some_text("system", record)
    if system and isinstance(prompt, str):
        raise Fault(f"column `system`: a prompt that is a text has no system turn; write {instead}")
    return prompt if prompt is None else with_system(system, prompt) if system else prompt


def _stored(value: object) -> str | None:
    return None if value is None else stored(value)


def _alike(prompt: Any, answer: Any) -> tuple[Any, Any]:
    """Prompt and answer in the same form: a text paired with messages becomes a message of the user or the
    assistant."""
    if isinstance(prompt, str) and isinstance(answer, list):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(answer, str) and isinstance(prompt, list):
        answer = [{"role": "assistant", "content": answer}]
    return prompt, answer


def alpaca_row(record: Mapping[str, Any]) -> Values:
    """Stored row of `instruction` and `output`, as prompt and completion."""
    instruction, output = (_optional(column, read_text, record) for column in ("instruction", "output"))
    asked: Values = {
        "instruction": instruction,
        "input": _some_text("input", record),
        "system": _some_text("system", record),
    }
    if history := _optional("history", read_history, record):
        asked |= {"history": history}
    return {
        "form": str(RowFormat.ALPACA),
        "prompt": None if instruction is None else stored(asked),
        "completion": _stored(output),
    }


def preference_row(record: Mapping[str, Any]) -> Values:
    """Stored row of a better and a worse answer to a prompt, or to `instruction` and `input`."""
    prompt, chosen, rejected = (
        _optional(column, _text_or_messages, record) for column in ("prompt", "chosen", "rejected")
    )
    asked = "\n".join(filter(None, (_some_text(column, record) for column in ("instruction", "input"))))
    if prompt is None and asked:
        prompt = [{"role": "user", "content": asked}]
        chosen, rejected = (_alike(prompt, answer)[1] for answer in (chosen, rejected))
    if chosen is not None and rejected is not None:
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt, chosen, rejected = _split_texts(prompt, chosen, rejected)
        elif isinstance(chosen, list) and isinstance(rejected, list):
            prompt, chosen, rejected = _split_chats(prompt, chosen, rejected)
        else:
            raise Fault("`chosen` and `rejected` differ in kind: one is a text, the other a list of messages")
    prompt = _behind_system(prompt, record, "prompt and answers as messages")
    kept = {"prompt": _stored(prompt), "chosen": _stored(chosen), "rejected": _stored(rejected)}
    margin = _answer("margin", _read_margin, record)
    return {"form": str(RowFormat.PREFERENCE), **kept, "tools": _tools(record), "margin": _stored(margin)}


def _read_margin(value: object) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and abs(float(value)) <= HIGHEST:
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise Fault(f"is {describe(value)}: expected a number, the margin between the answers")


def _split_texts(prompt: Any, chosen: str, rejected: str) -> tuple[Any, Any, Any]:
    """Without a prompt, texts are split at the end of their common beginning: the last `Assistant:` in it, else its
    last whole word."""
    if prompt is not None:
        return prompt, *(_alike(prompt, answer)[1] for answer in (chosen, rejected))
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = chosen[: next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))]
    turn = shared.rfind("Assistant:")
    length = turn + len("Assistant:") if turn >= 0 else len(shared[: shared.rfind(" ")]) if " " in shared else 0
    return shared[:length], chosen[length:], rejected[length:]


def _split_chats(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[Any, Any, Any]:
    """Conversations are split after the first messages that they share. A separate prompt is those messages, or
    precedes them."""
    length = shared_messages(chosen, rejected)
    shared = chosen[:length]
    if isinstance(prompt, str):
        is_asked = any(message["role"] == "user" and message["content"].strip() == prompt.strip() for message in shared)
        prompt = [] if is_asked or not prompt else [{"role": "user", "content": prompt}]
    elif prompt and chosen[: len(prompt)] == prompt:
        prompt = []
    return [*(prompt or []), *shared], chosen[length:], rejected[length:]


def unpaired_row(record: Mapping[str, Any]) -> Values:
    """Stored row of an answer that is good or bad."""
    kept = prompt_completion_row(record)
    good = _answer("label", _read_verdict, record)
    return {**kept, "form": str(RowFormat.UNPAIRED), "label": _stored(good)}


def _read_verdict(value: object) -> bool:
    verdicts = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, (bool, int, str)) and str(value).lower() in verdicts:
        return verdicts[str(value).lower()]
    raise Fault(f"expected true or false, not {describe(value)}")


def labelled_row(record: Mapping[str, Any]) -> Values:
    """Stored row of a text, or two, and its class or number."""
    label = _answer("label", _read_label, record)
    pair = _optional("text_pair", read_text, record)
    text = _optional("text", read_text, record)
    return {"form": str(RowFormat.LABELLED), "text": text, "text_pair": pair, "label": _stored(label)}


def _read_label(value: object) -> object:
    """The label: a class (name or number), a value, or a list of them."""
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, float) and not np.isfinite(part):
            raise Fault(f"expected a finite number, not {part}")
        if isinstance(part, str):
            read_text(part)
        elif not isinstance(part, (int, float)):
            raise Fault(f"expected a class name, a number, or a list of them, not {describe(part)}")
    return value


def tokens_row(record: Mapping[str, Any]) -> Values:
    """Stored row of token ids."""
    ids = _optional("input_ids", _read_ids, record)
    labels = _optional("labels", _read_ids, record)
    mask = _optional("attention_mask", _read_ids, record)
    if ids is not None:
        if len(ids) and ids.min() < 0:
            raise Fault(f"column `input_ids`: {ids.min()} is no token id")
        if labels is not None and len(labels) and (bad := labels[(labels < 0) & (labels != IGNORED)]).size:
            raise Fault(f"column `labels`: {bad[0]} is neither a token id nor {IGNORED}")
        for name, other in (("labels", labels), ("attention_mask", mask)):
            if other is not None and len(other) != len(ids):
                raise Fault(f"column `{name}`: {counted(len(other), 'number')} for {counted(len(ids), 'token')}")
        kept = slice(None) if mask is None else _unmasked(mask)
        ids, labels = ids[kept], None if labels is None else labels[kept]
    return {"form": str(RowFormat.TOKENS), "input_ids": ids, "labels": labels}


def _read_ids(value: object) -> npt.NDArray[np.int64]:
    if not isinstance(value, (list, np.ndarray)):
        raise Fault(f"expected a list of whole numbers, not {describe(value)}")
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.empty(0, object)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu") or any(type(each) is bool for each in value):
        odd = next((each for each in value if not isinstance(each, int) or isinstance(each, bool)), value)
        raise Fault(f"expected a list of whole numbers, not {describe(odd)} in it")
    if len(ids) and ids.max() > HIGHEST_ID:
        raise Fault(f"{ids.max()} is no token id")
    return ids.astype(np.int64)


def _unmasked(mask: npt.NDArray[np.int64]) -> slice:
    """The attended tokens, without padding at either end."""
    (attended,) = np.nonzero(mask)
    if not len(attended):
        return slice(0, 0)
    start, end = int(attended[0]), int(attended[-1]) + 1
    if end - start != len(attended):
        raise Fault("column `attention_mask`: tokens between others are masked, which is not supported")
    return slice(start, end)

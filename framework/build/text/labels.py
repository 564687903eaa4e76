"""Label masking: which tokens of a row are supervised, decided by position and never by token id."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from framework.build.text.chat import RENDER_SECONDS, Chat, Message, Span, Template, TemplateFault
from framework.build.text.limits import watched
from framework.build.text.messages import REASONING, Remark, is_empty, thoughts
from framework.build.text.tokenizer import own_end, own_start, without_end
from framework.schema.choices import Supervise

IGNORED = -100
"""Label of an unsupervised token, also in hand-made labels: `ignore_index` of torch's cross entropy."""

STAND_IN = "\ue000answer\ue000"
"""Placeholder for an answer, to find where the template puts it. Private-use characters do not occur in real text."""

HEADER_END = 8
"""Characters by which the end of a prompt is recognized in a rendered chat: the length of a short turn token."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """One row as tokens. `labels[i]` is `input_ids[i]` if supervised, else `IGNORED`; both int32, same length. A row's
    own labels are kept as they are.

    The first label is always `IGNORED`: that token has no context to predict it from. So for a loss over tokens, the
    number of other labels is the number of terms of the loss.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    target: npt.NDArray[np.float32] | None = None
    """Target of the row as a whole: its class, its value, or one number for each class."""
    rejected: "Encoded | None" = None
    """The worse answer to the same prompt; this row has the better one."""
    parts: tuple[Span, ...] = ()
    """Positions of the text, or of both texts of a pair, in a row with one label; empty for other rows. Tokens around
    them survive truncation."""
    remarks: frozenset[Remark] = frozenset()
    """Possible mistakes in the row."""


@dataclass(frozen=True)
class Marked:
    """A rendered conversation and its supervised spans."""

    text: str
    spans: Sequence[Span]
    remarks: frozenset[Remark]


class UnsuitedChat(ValueError):
    """A conversation that the template cannot render, or whose answers cannot be found in the rendered text."""


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoded]:
    """Encode whole texts, all tokens supervised, with the tokenizer's start token (if it adds one) and end token;
    neither is doubled if the text already contains it."""
    start, last = own_start(tokenizer), tokenizer.eos_token or ""
    bare = [without_end(text.removeprefix(start), last) for text in texts]
    batch = tokenizer(bare, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    end = tokenizer.eos_token_id
    rows = []
    for ids in cast(list[list[int]], batch["input_ids"]):
        if isinstance(end, int) and ids[-1:] != [end]:
            ids.append(end)
        rows.append(_encoded(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)))
    return rows


def encode_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], supervise: Supervise = Supervise.ASSISTANT
) -> list[Encoded | UnsuitedChat]:
    """Encode conversations. Supervised are the assistant's turns including their end token: every turn (`assistant`),
    the last one, those after the prompt (`completion`); or `all` of the text.

    A template's `{% generation %}` blocks decide if it has them. Otherwise the answers are found by rendering (see
    `answer_spans`). A token is supervised if it shares a character with an answer. A conversation that cannot be
    encoded is replaced by the reason.
    """
    template = Template(tokenizer)
    with watched(RENDER_SECONDS):
        marked = [_mark(template, chat, supervise) for chat in chats]
    texts = [mark.text for mark in marked if isinstance(mark, Marked)]
    if not texts:
        return [mark for mark in marked if isinstance(mark, UnsuitedChat)]
    tokens = iter(_tokens(tokenizer, texts))
    return [
        replace(_label_between(next(tokens), mark.spans), remarks=mark.remarks) if isinstance(mark, Marked) else mark
        for mark in marked
    ]


def encode_completions(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, str]], everything: bool = False
) -> list[Encoded]:
    """Encode texts as prompt and completion, concatenated; supervised is the completion with the end token, or
    `everything`.

    Start and end tokens that the text already contains are not doubled. A token with characters of both is supervised.
    """
    if not rows:
        return []
    start, bare = own_start(tokenizer), list[tuple[str, str]]()
    for prompt, completion in rows:
        completion = without_end(completion, tokenizer.eos_token or "")
        bare.append((prompt.removeprefix(start), completion) if prompt else ("", completion.removeprefix(start)))
    texts = [prompt + completion for prompt, completion in bare]
    batch = tokenizer(texts, return_offsets_mapping=True, verbose=False)
    end = tokenizer.eos_token_id
    found = []
    for number, (ids, offsets) in enumerate(zip(batch["input_ids"], batch["offset_mapping"], strict=True)):
        prompt, completion = bare[number]
        is_ended = isinstance(end, int) and bool(rows[number][1])
        if is_ended and ids[-1:] != [end]:
            ids, offsets = [*ids, end], [*offsets, (0, 0)]
        characters = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        first, behind = 0 if everything else len(prompt), len(prompt) + len(completion)
        supervised = (characters[:, 1] > first) & (characters[:, 0] < behind)
        row = _encoded(np.array(ids, dtype=np.int32), supervised)
        if is_ended:
            row.labels[-1:] = end
        found.append(row if completion.strip() else replace(row, remarks=frozenset({Remark.EMPTY_ANSWER})))
    return found


def encode_labelled(tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str | None]]) -> list[Encoded]:
    """Encode texts, or pairs of them, with the tokenizer's own special tokens; no token is supervised."""
    found, start, end = [], own_start(tokenizer), own_end(tokenizer)
    for written in texts:
        text, pair = (each and (without_end(each.removeprefix(start), end) or each) for each in written)
        batch = tokenizer(text, pair, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        ids = np.array(batch["input_ids"], dtype=np.int32)
        owners = np.array([-1 if owner is None else owner for owner in batch.sequence_ids(0)])
        places = (np.flatnonzero(owners == owner) for owner in (0, 1))
        parts = tuple((int(place[0]), int(place[-1]) + 1) for place in places if len(place))
        found.append(replace(_encoded(ids, np.zeros(len(ids), dtype=np.bool_)), parts=parts))
    return found


def encode_tokens(ids: Sequence[int], labels: Sequence[int] | None) -> Encoded:
    """Encode token ids unchanged, with their own labels, or all supervised."""
    tokens = np.array(ids, dtype=np.int32)
    if labels is None:
        return _encoded(tokens, np.ones(len(tokens), dtype=np.bool_))
    own = np.array(labels, dtype=np.int32)
    own[:1] = IGNORED  # the first token has no context, so it has no loss
    return Encoded(tokens, own)


def answer_spans(template: Template, chat: Chat, whole: str, answers: Sequence[int]) -> list[Span]:
    """Spans in `whole`, the rendered chat, that the model generates in these assistant turns.

    A turn is the difference between the chat rendered up to its prompt and the chat rendered up to its end, provided
    that each is a prefix of the next. Templates that render a turn differently when it is not the last (they drop its
    reasoning, or move the system message) fail that test; there the turn is found by a placeholder. Raises UnsuitedChat
    if that fails too.
    """
    prompts = {index: template.render_or_none(chat.through(index), generation_prompt=True) for index in answers}
    closing = _closing(chat, whole, prompts.get(len(chat.messages) - 1)) if len(answers) > 1 else ""
    spans = []
    for index in answers:
        span = _difference_span(template, chat, index, whole, prompts[index], closing)
        start, end = span or _stand_in_span(template, chat, index, whole)
        # a line break after the end token is the template's; generation has stopped before it
        text = whole[start:end].rstrip()
        spans.append((start, start + len(text) if template.specials and text.endswith(template.specials) else end))
    return spans


def _mark(template: Template, chat: Chat, supervise: Supervise) -> Marked | UnsuitedChat:
    try:
        is_marked = supervise is not Supervise.ALL and template.marks_generation(chat)
        whole, spans = template.render_marked(chat) if is_marked else (template.render(chat), [])
        lost = _lost(template, chat, whole)
        answers = chat.answers()
        if supervise is Supervise.LAST:
            answers = answers[-1:]
        if supervise is Supervise.COMPLETION:
            answers = [index for index in answers if index >= chat.prompt]
        answers = [index for index in answers if index not in chat.left_out]
        written = (text for index in chat.answers() for text in thoughts(chat.messages[index]))
        seen = {
            Remark.EMPTY_ANSWER: any(is_empty(chat.messages[index]) for index in answers),
            Remark.LOST_THOUGHT: any(text not in whole for text in written),
            Remark.LOST_CONTENT: lost,
            Remark.OTHER_TURN: chat.asks_others,
        }
        remarks = frozenset(remark for remark, is_so in seen.items() if is_so)
        if supervise is Supervise.ALL:
            remarks -= {Remark.OTHER_TURN}
            return Marked(whole, list(_around(_left_out_spans(template, chat, whole), len(whole))), remarks)
        if is_marked and answers == chat.answers():
            return Marked(whole, spans, remarks)
        turns = answer_spans(template, chat, whole, answers)
        if is_marked:
            turns = [span for span in spans if any(span[0] < end and span[1] > start for start, end in turns)]
        return Marked(whole, turns, remarks)
    except UnsuitedChat as unsuited:
        return unsuited
    except TemplateFault as fault:
        return UnsuitedChat(f"the chat template does not render it: {fault}")


def _lost(template: Template, chat: Chat, whole: str) -> bool:
    """Whether the template drops the content of a message. Raises UnsuitedChat if it drops an answer or a tool call,
    since the turn would be supervised as an empty one."""
    found = False
    for index, message in enumerate(chat.messages):
        calls, lines = message.get("tool_calls", ()), message["content"].split("\n")
        if any(call.get("function", call)["name"] not in whole for call in calls):
            raise UnsuitedChat(f"the chat template does not write the tool call in message {index + 1}")
        if not message["content"].strip() or any(line.strip() and line.strip() in whole for line in lines):
            continue
        other = template.render_or_none(chat.with_message(index, {**message, "content": STAND_IN}))
        if other is not None and STAND_IN[0] not in other:
            if index in chat.answers() and not calls:
                raise UnsuitedChat(f"the chat template does not write the answer in message {index + 1}")
            found = True
    return found


def _left_out_spans(template: Template, chat: Chat, whole: str) -> list[Span]:
    """Spans of the turns that the row marks as not supervised. Raises UnsuitedChat if one cannot be found."""
    own = [index for index in chat.answers() if index in chat.left_out]
    spans = answer_spans(template, chat, whole, own)
    for index in sorted(chat.left_out.difference(own)):
        before = template.render_or_none(chat.through(index)) or ""
        through = template.render_or_none(chat.through(index + 1))
        if through is None or not through.startswith(before) or not whole.startswith(through):
            what = "is marked as not supervised and cannot be found in the text that the chat template renders"
            raise UnsuitedChat(f"message {index + 1} {what}")
        spans.append((len(before), len(through)))
    return spans


def _around(spans: Sequence[Span], length: int) -> Iterator[Span]:
    """The complement of the spans in a text of this length."""
    at = 0
    for start, end in sorted(spans):
        if start > at:
            yield (at, start)
        at = max(at, end)
    if at < length:
        yield (at, length)


_CALLED = ("__call__", "_encode_plus", "_batch_encode_plus")
"""Methods behind a tokenizer's call in transformers from 5.0 on."""


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    """Tokenize texts without start and end tokens, which templates write themselves.

    transformers makes a dictionary for each text, which is slow for short texts. So its call tokenizes only the first,
    which also sets the options of the underlying fast tokenizer, and that one tokenizes the rest; except for a class
    that overrides the call.
    """

    def called(part: Sequence[str]) -> list[Encoding]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return cast(list[Encoding], tokenizer(list(part), **options, verbose=False).encodings)

    own, usual = type(tokenizer), PreTrainedTokenizerFast
    if any(getattr(own, name, None) is not getattr(usual, name, None) for name in _CALLED):
        return called(texts)
    backend = cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer
    return [*called(texts[:1]), *backend.encode_batch(texts[1:], add_special_tokens=False)]


def _label_between(tokens: Encoding, spans: Sequence[Span]) -> Encoded:
    """Supervise the tokens that share a character with a span. Tokens are in text order, so the ends of a span are
    found by bisection: converting all tokens' offsets to Python objects would take longer than tokenizing.
    """
    input_ids = np.array(tokens.ids, dtype=np.int32)
    labels, numbers = np.full(len(input_ids), IGNORED, dtype=np.int32), range(len(input_ids))
    characters = cast(Callable[[int], Span], tokens.token_to_chars)
    for start, end in spans:
        first = bisect_right(numbers, start, key=lambda token: characters(token)[1])
        behind = bisect_left(numbers, end, first, key=lambda token: characters(token)[0])
        labels[first:behind] = input_ids[first:behind]
    labels[:1] = IGNORED
    return Encoded(input_ids, labels)


def _encoded(input_ids: npt.NDArray[np.int32], supervised: npt.NDArray[np.bool_]) -> Encoded:
    labels = np.where(supervised, input_ids, np.int32(IGNORED))
    labels[:1] = IGNORED
    return Encoded(input_ids, labels)


def _closing(chat: Chat, whole: str, prompt: str | None) -> str:
    """The text that the template writes after the final answer, which follows `prompt`; empty if it cannot be
    determined."""
    if prompt is None or not whole.startswith(prompt):
        return ""
    return next((whole[end:] for _, end in _as_it_stands(chat.messages[-1], whole, len(prompt))), "")


def _as_it_stands(message: Message, whole: str, start: int) -> Iterator[Span]:
    """Span of a plain message's content at `start`, as it is or stripped."""
    content = message["content"]
    if content and message.keys() <= {"role", "content"}:
        for text in dict.fromkeys((content, content.strip())):
            if whole.startswith(text, start):
                yield (start, start + len(text))


def _difference_span(
    template: Template, chat: Chat, index: int, whole: str, prompt: str | None, closing: str
) -> Span | None:
    """Span of a turn as the difference of two renderings; None if the prefix test fails.

    Templates drop the reasoning of earlier turns, so the turn is also tried without it. If the answer directly follows
    its prompt and is followed by `closing`, its end is known without a rendering.
    """
    message = chat.messages[index]
    if closing and prompt is not None and whole.startswith(prompt):
        for start, end in _as_it_stands(message, whole, len(prompt)):
            if whole.startswith(closing, end):
                return (start, end + len(closing))
    bare = {name: value for name, value in message.items() if name not in REASONING}
    for turn in [message] if bare == message else [message, bare]:
        is_whole = turn is message and index == len(chat.messages) - 1
        through = whole if is_whole else template.render_or_none(chat.with_message(index, turn).through(index + 1))
        if prompt is not None and through is not None and through.startswith(prompt) and whole.startswith(through):
            return (len(prompt), len(through))
    return None


def _stand_in_span(template: Template, chat: Chat, index: int, whole: str) -> Span:
    message = chat.messages[index]
    for kept in ({"role": message["role"]}, message):
        stand_in = chat.with_message(index, {**kept, "content": STAND_IN})
        before, found, after = (template.render_or_none(stand_in) or "").rpartition(STAND_IN)
        start = _shared_length(before, whole)
        end = len(whole) - _shared_length(after[::-1], whole[::-1])
        if found and start <= end and _may_be(whole[start:end].strip(), message, whole.endswith(after)):
            break
    else:
        raise UnsuitedChat(f"the answer in message {index + 1} cannot be found in what the chat template renders")
    start = _start_of_turn(template, chat.through(index), before[:start], start)
    return (start, _end_of_turn(template, stand_in.through(index + 1), whole, end))


def _start_of_turn(template: Template, asked: Chat, before: str, start: int) -> int:
    """Start of the turn whose answer starts at `start`, after `before`: where generation would start. The model also
    generates the text between prompt and answer: an empty reasoning block, a channel, a space.
    """
    prompt = template.render_or_none(asked, generation_prompt=True)
    if prompt is None:
        return start
    if before.startswith(prompt):
        return len(prompt)
    header = prompt[_shared_length(prompt, template.render_or_none(asked) or "") :]
    found = before.rfind(header) + len(header)
    last = asked.messages[-1]["content"].strip()
    if header.strip() and found >= len(header) and last and last not in before[found:]:
        return found
    bare = before.rstrip()
    return len(bare) if bare and prompt.endswith(bare[-HEADER_END:]) else start


def _may_be(text: str, message: Message, is_all_else_there: bool) -> bool:
    """Whether `text` can be the rendering of a message: a part of its content, or with calls and reasoning."""
    is_plain = not message.get("tool_calls") and not any(message.get(name) for name in REASONING)
    return text in message["content"] or (not is_plain and is_all_else_there and message["content"].strip() in text)


def _end_of_turn(template: Template, through: Chat, whole: str, end: int) -> int:
    """End of the turn whose answer ends at `end`: after the text that would also follow it at the end of a chat. If the
    last turn of a chat ends in another token (`<|return|>`) than earlier turns (`<|end|>`), the two share their first
    characters; that is enough, since a token is supervised as a whole if one of its characters is.

    Text after the end token that both share (`<|endoftext|>`, `<|user|>`) is not part of the turn.
    """
    closing = (template.render_or_none(through) or "").rpartition(STAND_IN)[2]
    shared = closing[: _shared_length(closing, whole[end:])]
    ends = [shared.rfind(token) + len(token) for token in template.specials if token in shared]
    return end + max(ends, default=len(shared))


def _shared_length(first: str, second: str) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((length for length, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))

"""Chat templates: rendering of conversations, and checks of a tokenizer's template."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from framework.build.hub import one_line
from framework.build.text.limits import OutOfTime, compiled, limited, watched
from framework.build.text.messages import REASONING
from framework.build.text.named_templates import template_names
from framework.errors import Problem, RequestError

Message: TypeAlias = dict[str, Any]
"""`role` and `content`, and optionally the fields that framework/build/text/messages.py keeps: tool calls, reasoning, a
name."""


@dataclass(frozen=True)
class Chat:
    """A conversation, and the tools that it may call."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    prompt: int = 0
    """Number of messages at the beginning that are the prompt, if the row has one."""
    left_out: frozenset[int] = frozenset()
    """Indices of messages that the row marks as not supervised."""
    asks_others: bool = False
    """Whether the row marks turns for training that are not the assistant's."""

    def through(self, count: int) -> "Chat":
        """The chat with its first `count` messages."""
        return replace(self, messages=self.messages[:count])

    def with_message(self, index: int, message: Message) -> "Chat":
        """The chat with one message replaced."""
        return replace(self, messages=[*self.messages[:index], message, *self.messages[index + 1 :]])

    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT]


Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

T = TypeVar("T")


class TemplateFault(ValueError):
    """Why a template does not render a conversation: any exception of Jinja or of the template's own code."""


ASSISTANT = "assistant"

_PLAIN = frozenset({"role", "content", "name"})
"""Text fields with the same meaning in every template."""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which no tokenizer takes. Rows with one are refused where they are read."""

ROWS_CHECKED = 3
"""Rows that `check_chat` renders."""

RENDER_SECONDS = 1.0
"""Limit of processor time for one rendering (plus up to a tenth). Public templates take 0.1 to 5 ms, and 50 ms for a
conversation of 1 MB."""

SLOWEST, TRIED_SECONDS = 50_000, 1.0
"""Characters a second that a template has to write, and the processor time after which that is checked. Eight public
templates write 590,000 or more for conversations of a few words (EPYC, jinja2 3.1, 2026-11)."""


def _with_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names that templates use, as transformers does since 5.2x."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if thought is None:
        return dict(message)
    return {"thinking": thought, **message, "reasoning_content": thought}


MOST_ADDED, MOST_TIMES = 50_000, 20
"""Characters that a template may add, and how often it may repeat its input: longer output means a runaway loop."""


@dataclass(frozen=True)
class Template:
    """A tokenizer's template for a batch of rows, with the tokenizer's attributes read once."""

    tokenizer: PreTrainedTokenizerBase
    effort: "Effort" = field(default_factory=lambda: Effort(), compare=False)

    def render(self, chat: Chat, generation_prompt: bool = False) -> str:
        """The conversation as text; with `generation_prompt`, up to the start of generation.

        Raises TemplateFault if the template refuses it, RequestError if it takes too long.
        """

        text = self._text(chat)  # compiled before it is timed

        def plain(messages: Sequence[Message]) -> str:
            options = {**self._named, "add_generation_prompt": generation_prompt}
            return cast(str, compiled(text).render(messages=messages, tools=None, documents=None, **options))

        def prepared(messages: Sequence[Message]) -> str:
            written = self.tokenizer.apply_chat_template(
                list(messages),
                list(chat.tools) or None,
                chat_template=text,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
            return cast(str, written)

        # `apply_chat_template` leaves messages with text fields alone unchanged, but walks through them for each
        # rendering, which takes longer than rendering; a test compares the two paths.
        if chat.messages and not chat.tools and all(each.keys() <= _PLAIN for each in chat.messages):
            return self._timed(plain, chat, chat.messages, str)
        return self._with_arguments(prepared, chat, str)

    def render_or_none(self, chat: Chat, generation_prompt: bool = False) -> str | None:
        """As `render`; None if refused, since templates may refuse a part of a chat that they render as a whole."""
        try:
            return self.render(chat, generation_prompt) if chat.messages else None
        except TemplateFault:
            return None

    def render_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """The conversation as text, and the spans of the template's `{% generation %}` blocks.

        Raises TemplateFault if the template refuses it, RequestError if it takes too long.
        """

        template = self._text(chat)

        def rendered(messages: Sequence[Message]) -> tuple[str, list[Span]]:
            found = render_jinja_template(
                [list(messages)],
                tools=list(chat.tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._named,
            )
            texts, spans = cast(tuple[list[str], list[list[Span]]], found)
            return texts[0], spans[0]

        return self._with_arguments(rendered, chat, lambda made: made[0])

    def _with_arguments(self, render: Callable[[Sequence[Message]], T], chat: Chat, text: Callable[[T], str]) -> T:
        """The rendering, with the arguments of calls as objects; or as JSON text, if the template concatenates them
        with text (DeepSeek's does) or would write an object as Python prints it."""
        messages = [_with_thought(message) for message in chat.messages]
        if not any(message.get("tool_calls") for message in messages):
            return self._timed(render, chat, messages, text)
        made: T | TemplateFault
        try:
            made = self._timed(render, chat, messages, text)
            if not any(_is_printed(call, text(made)) for call in _calls(messages)):
                return made
        except TemplateFault as fault:
            made = fault
        try:
            return self._timed(render, chat, [_with_text_arguments(message) for message in messages], text)
        except TemplateFault:
            if isinstance(made, TemplateFault):
                raise made from None
            return made

    def _timed(
        self,
        render: Callable[[Sequence[Message]], T],
        chat: Chat,
        messages: Sequence[Message],
        text: Callable[[T], str],
    ) -> T:
        """The rendering, within limits. A template is a program that comes with a model: it may raise anything, or not
        end."""
        started = time.thread_time()
        try:
            with watched(RENDER_SECONDS):
                made = limited(lambda: render(messages))
        except OutOfTime as error:
            took = str(error)
        except Exception as error:
            raise TemplateFault(one_line(error)) from error
        else:
            if half := _HALF.search(text(made)):
                raise TemplateFault(f"it writes {half[0]!r}, which is not a character")
            written = len(text(made))
            given = 0 if written <= MOST_ADDED else len(str(messages)) + len(str(chat.tools))
            if written > MOST_ADDED + MOST_TIMES * given:
                raise TemplateFault(f"it writes {written:,} characters for {given:,} of the conversation")
            self.effort.add(time.thread_time() - started, written)
            if not self.effort.is_too_slow:
                return made
            took = f"{self.effort.seconds / self.effort.times:.2g} s"
        begin = next((message["content"] for message in messages if message["content"]), "")[:40]
        message = f"the chat template takes {took} to render the conversation that begins with {begin!r}"
        raise RequestError([Problem("model.chat_template", message, expected="a template that ends in milliseconds")])

    def marks_generation(self, chat: Chat) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}` blocks."""
        return _has_generation_block(self._text(chat))

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """The text of all special and added tokens."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in tokens if token.content.strip())

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    @cached_property
    def _without_tools(self) -> str:
        return self._read(None)

    def _text(self, chat: Chat) -> str:
        """The template's source for this chat: a tokenizer may have a separate one for chats with tools."""
        return self._read(list(chat.tools)) if chat.tools else self._without_tools

    def _read(self, tools: list[dict[str, Any]] | None) -> str:
        try:
            text = cast(str, self.tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise TemplateFault(one_line(error)) from error
        try:
            with watched(RENDER_SECONDS):
                limited(lambda: compiled(text))
        except OutOfTime as error:
            message = f"the chat template takes {error} to compile"
            raise RequestError([Problem("model.chat_template", message, expected="a template of a few kB")]) from None
        except Exception as error:  # RecursionError, SyntaxError of Python and more
            raise TemplateFault(one_line(error)) from error
        return text


@dataclass
class Effort:
    """Total processor time and characters of renderings."""

    seconds: float = 0.0
    characters: int = 0
    times: int = 0

    def add(self, seconds: float, characters: int) -> None:
        self.seconds += seconds
        self.characters += characters
        self.times += 1

    @property
    def is_too_slow(self) -> bool:
        return self.seconds > TRIED_SECONDS and self.characters < SLOWEST * self.seconds


def _calls(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call.get("function", call)


def _is_printed(call: Mapping[str, Any], text: str) -> bool:
    """Whether the text has the arguments as Python prints an object, which no model was trained to write."""
    arguments = call["arguments"]
    printed = repr(arguments)
    return bool(arguments) and printed != _as_text(arguments) and printed in text


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    made = []
    for call in message["tool_calls"]:
        inner = call.get("function", call)
        inner = {**inner, "arguments": _as_text(inner["arguments"])}
        made.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": made}


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_prompt: bool = False) -> str:
    """Render one conversation, as `Template.render` does."""
    return Template(tokenizer).render(chat, generation_prompt)


@cache
def _has_generation_block(template: str) -> bool:
    return bool(_GENERATION_BLOCK.search(template))


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can render a conversation."""
    return bool(tokenizer.chat_template)


def check_chat(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> dict[str, str]:
    """Check that this tokenizer can render these conversations, by the first three. Returns warnings by kind.

    Raises RequestError if there is no template, or if it does not compile or refuses a row.
    """
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        problem = Problem(
            "model.chat_template",
            "the rows are chats and the tokenizer has no chat template",
            expected=f"a template in model.chat_template: a Jinja file, or one of {', '.join(template_names())}",
        )
        raise RequestError([problem]) from error
    warnings: dict[str, str] = {}
    template = Template(tokenizer)
    for number, chat in enumerate(islice(chats, ROWS_CHECKED), 1):
        try:
            warnings = {**_doubts(template, chat), **warnings}
        except TemplateFault as error:
            message = f"the chat template does not render chat {number}: {error}"
            raise RequestError([Problem("model.chat_template", message)]) from error
    return {kind: f"model.chat_template: {warning}" for kind, warning in warnings.items()}


def _doubts(template: Template, chat: Chat) -> dict[str, str]:
    """Differences between the training text and generation, judged by the last answer: warnings by kind, since their
    text quotes a row."""
    whole = template.render(chat)
    last = max(chat.answers(), default=0)
    if not last:
        return {}
    found = {}
    prompt = template.render(chat.through(last), generation_prompt=True)
    if not whole.startswith(prompt):
        found["prompt"] = (
            f"generation starts from a prompt that ends in {prompt[-40:]!r}, which the training rows do not have; "
            "the model is trained on different text than it will see"
        )
    ending = whole.rstrip()
    if last == len(chat.messages) - 1 and not ending.endswith(template.specials):
        found["end"] = (
            f"an assistant turn ends in {ending[-20:]!r}, which is not a special token of this tokenizer, "
            "so generation has no token to stop at"
        )
    elif template.marks_generation(chat) and (token := _unmarked_end(template, chat)):
        found["block"] = (
            f"the generation block of the template leaves out {token!r}, the end of the turn, "
            "so the model does not learn to stop"
        )
    if chat.tools and whole == template.render(replace(chat, tools=())):
        found["tools"] = "the template does not write the `tools` of the rows, so the model does not see them"
    if any(message.get("name") and message["role"] not in ("tool", "function") for message in chat.messages):
        nameless = tuple({key: value for key, value in message.items() if key != "name"} for message in chat.messages)
        if whole == template.render(replace(chat, messages=nameless)):
            found["name"] = "the template does not write the `name` of turns, so the model does not see who speaks"
    return found


def _unmarked_end(template: Template, chat: Chat) -> str | None:
    """The special token right after the last generation block, if there is one."""
    whole, spans = template.render_marked(chat)
    rest = whole[spans[-1][1] :] if spans else ""
    return next((token for token in template.specials if rest.startswith(token)), None)

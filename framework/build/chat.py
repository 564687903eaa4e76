"""Chat templates: where they come from, how a conversation is rendered, and whether a tokenizer can do it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from framework.beside import path_like
from framework.build.hub import nearest, one_line
from framework.errors import Problem, RequestError
from framework.regular_files import read_regular

Message: TypeAlias = dict[str, Any]
"""`role` and `content`; a turn may also have what framework/build/messages.py keeps: tool calls, reasoning, a name."""


@dataclass(frozen=True)
class Chat:
    """A conversation, and the tools that it may call."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    prompt: int = 0
    """Messages at the beginning that are the prompt, where the row says so."""

    def through(self, count: int) -> "Chat":
        """Its first messages."""
        return Chat(self.messages[:count], self.tools, self.prompt)

    def answers(self) -> list[int]:
        """Numbers of the messages that the assistant writes."""
        return [index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT]


Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError)
"""What rendering raises: Jinja's own, and what a template's arithmetic on a message may cause."""

TEMPLATES = Path(__file__).parent / "templates"

ASSISTANT = "assistant"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that a thought has in a message; a template is given it under the one that it reads."""

_PLAIN = frozenset({"role", "content", "name"})
"""Fields of a message that hold a text and mean the same to every template."""

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

ROWS_CHECKED = 3
"""Rows that `check_chat` renders (case D07)."""


def template_names() -> list[str]:
    """Names that `model.chat_template` may have instead of a text or a file."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def read_template(written: str) -> str:
    """The Jinja text meant by `model.chat_template`: a name of ours, the text itself, or the path of a file.

    Raises RequestError when it is none of them.
    """
    if written in template_names():
        return (TEMPLATES / f"{written}.jinja").read_text(encoding="utf-8")
    if "{{" in written or "{%" in written:
        return written
    path = Path(written).expanduser()
    try:
        return read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        problem = Problem(
            "model.chat_template",
            f"{written!r} is no template of ours, has no Jinja in it, and the file {path.absolute()} {reason}",
            expected=f"a file, a Jinja text, or one of: {', '.join(template_names())}",
            nearest=nearest(written, template_names()) or path_like(written, Path.is_file),
        )
        raise RequestError([problem]) from error


def _with_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thought under the names that templates read, as transformers has it since 5.2x."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if thought is None:
        return dict(message)
    return {"thinking": thought, **message, "reasoning_content": thought}


@dataclass(frozen=True)
class Template:
    """A tokenizer's template, with what every rendering reads of the tokenizer read once: for a batch of rows."""

    tokenizer: PreTrainedTokenizerBase

    def render(self, chat: Chat, generation_prompt: bool = False) -> str:
        """The conversation as text; with `generation_prompt`, up to where the model would begin to write.

        Raises one of TEMPLATE_ERRORS when the template refuses it.
        """
        if _is_plain(chat):
            said = {**self._named, "add_generation_prompt": generation_prompt}
            return cast(str, self._plain.render(messages=chat.messages, tools=None, documents=None, **said))
        text = self.tokenizer.apply_chat_template(
            [_with_thought(message) for message in chat.messages],
            list(chat.tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        return cast(str, text)

    def render_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """The conversation as text, and the spans that the template's `{% generation %}` blocks wrote.

        Raises one of TEMPLATE_ERRORS when the template refuses it.
        """
        rendered = render_jinja_template(
            [[_with_thought(message) for message in chat.messages]],
            tools=list(chat.tools) or None,
            chat_template=self._text(chat),
            return_assistant_tokens_mask=True,
            **self._named,
        )
        texts, spans = cast(tuple[list[str], list[list[Span]]], rendered)
        return texts[0], spans[0]

    def marks_generation(self, chat: Chat) -> bool:
        """Whether the template itself says what the assistant writes, by `{% generation %}` blocks."""
        return _has_generation_block(self._text(chat))

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """Every token that is never made of pieces of text, as it is written."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in tokens if token.content.strip())

    @cached_property
    def _named(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    @cached_property
    def _without_tools(self) -> str:
        return cast(str, self.tokenizer.get_chat_template())

    @cached_property
    def _plain(self) -> Any:
        return _compiled(self._without_tools)

    def _text(self, chat: Chat) -> str:
        """The text of the template for this chat: a tokenizer may have another one for chats with tools."""
        if not chat.tools:
            return self._without_tools
        return cast(str, self.tokenizer.get_chat_template(tools=list(chat.tools)))


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_prompt: bool = False) -> str:
    """One conversation, as `Template.render` has it."""
    return Template(tokenizer).render(chat, generation_prompt)


@cache
def _compiled(template: str) -> Any:
    """transformers' own compiled template; its globals in one mapping, for each rendering goes through them."""
    compiled = _compile_jinja_template(template)
    compiled.globals = dict(compiled.globals)
    return compiled


def _is_plain(chat: Chat) -> bool:
    """Whether there are only turns with texts, of which `apply_chat_template` makes no other messages first.

    Walking through them for each rendering would take longer than the rendering; a test compares the two.
    """
    return bool(chat.messages) and not chat.tools and all(each.keys() <= _PLAIN for each in chat.messages)


@cache
def _has_generation_block(template: str) -> bool:
    return bool(_GENERATION_BLOCK.search(template))


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can render a conversation."""
    return bool(tokenizer.chat_template)


def check_chat(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> tuple[str, ...]:
    """Whether this tokenizer can render these conversations; looks at the first three. Returns warnings.

    Raises RequestError when there is no template, or when the template does not compile or refuses a row.
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
    warnings: dict[str, None] = {}
    template = Template(tokenizer)
    for number, chat in enumerate(islice(chats, ROWS_CHECKED), 1):
        try:
            warnings.update(dict.fromkeys(_doubts(template, chat)))
        except TEMPLATE_ERRORS as error:
            message = f"the chat template does not render chat {number}: {one_line(error)}"
            raise RequestError([Problem("model.chat_template", message)]) from error
    return tuple(warnings)


def _doubts(template: Template, chat: Chat) -> list[str]:
    """What would make the trained model behave unlike the rows it was trained on, judged by the last answer."""
    whole = template.render(chat)
    last = max(chat.answers(), default=0)
    if not last:
        return []
    found = []
    prompt = template.render(chat.through(last), generation_prompt=True)
    if not whole.startswith(prompt):
        found.append(
            f"the prompt that generation starts from ends in {prompt[-40:]!r}, which the training rows do not have; "
            "the model is trained on other text than it will see"
        )
    ending = whole.rstrip()
    if last == len(chat.messages) - 1 and not ending.endswith(template.specials):
        found.append(
            f"an assistant turn ends in {ending[-20:]!r}, which is no special token of this tokenizer, "
            "so nothing tells generation to stop"
        )
    elif template.marks_generation(chat) and (token := _unmarked_end(template, chat)):
        found.append(
            f"the generation block of the template leaves out {token!r}, the end of the turn, "
            "so the model does not learn to stop"
        )
    found.extend(_unwritten(template, chat, whole))
    return [f"model.chat_template: {doubt}" for doubt in found]


def _unwritten(template: Template, chat: Chat, whole: str) -> list[str]:
    """What the rows have and the template leaves out of them: tools, and the last thought."""
    found = []
    if chat.tools and whole == template.render(replace(chat, tools=())):
        found.append("the template does not write the `tools` of the rows; the model is not told of them")
    last = chat.messages[max(chat.answers())]
    thoughts = [name for name in REASONING if (last.get(name) or "").strip() and last[name].strip() not in whole]
    if thoughts:
        found.append(f"the template does not write `{thoughts[0]}`, the thought before an answer, which is not learnt")
    return found


def _unmarked_end(template: Template, chat: Chat) -> str | None:
    """The special token that follows the last generation block, if there is one."""
    whole, spans = template.render_marked(chat)
    rest = whole[spans[-1][1] :] if spans else ""
    return next((token for token in template.specials if rest.startswith(token)), None)

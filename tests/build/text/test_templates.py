"""What is trained on under ten chat templates, read from the ids: each answer with the token that ends its turn.

The templates in tests/build/templates are the public ones, shortened in what they tell the model, not in how they
render turns.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from framework.build.text import labels
from framework.build.text.chat import Chat, check_chat, render
from framework.build.text.labels import IGNORED, Encoded, UnsuitedChat, encode_chats
from framework.build.text.messages import Remark
from framework.build.text.named_templates import read_template
from framework.schema.choices import Supervise

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

FOLDER = Path(__file__).parent.parent / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>",
    "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>",
    "<|return|>", "<|call|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
RESULT = {"role": "tool", "name": "add", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}

TURNS = Chat([user("What is two and two?"), answer("Four."), user("Sure?"), answer("Yes.")])
WITH_SYSTEM = Chat([SYSTEM, *TURNS.messages])
CALLS = Chat(
    [SYSTEM, user("two?"), answer("", tool_calls=[CALL]), RESULT, answer("Four."), user("Sure?"), answer("Yes.")], TOOLS
)
"""A call in an earlier turn."""
THOUGHTS = Chat(
    [
        user("two?"),
        answer("", tool_calls=[CALL], reasoning_content="I add."),
        RESULT,
        answer("Four.", reasoning_content="Easy."),
    ],
    TOOLS,
)
"""Thoughts in the turns that follow the last question."""
OLD_THOUGHTS = Chat([*THOUGHTS.messages, user("Sure?"), answer("Yes.", reasoning_content="I am.")], TOOLS)
"""Thoughts before the last question, which templates drop, and behind it."""

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
LLAMA_CALL = '{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 2}}]<|endoftext|>'
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
HARMONY_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}<|call|>'
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"

CUSTOM = "{% for m in messages %}{{ '\n' + m.role | upper + '> ' + m.content + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '\nASSISTANT> ' }}{% endif %}"
)

EXPECTED: dict[str, tuple[Chat, list[str]]] = {
    "chatml": (WITH_SYSTEM, ["Four.<|im_end|>", "Yes.<|im_end|>"]),
    "llama31": (WITH_SYSTEM, ["Four.<|eot_id|>", "Yes.<|eot_id|>"]),
    "llama31 calls": (CALLS, [LLAMA_CALL, "Four.<|eot_id|>", "Yes.<|eot_id|>"]),
    "mistral_v3": (WITH_SYSTEM, [" Four.<|endoftext|>", " Yes.<|endoftext|>"]),
    "mistral_v3 calls": (CALLS, [MISTRAL_CALL, " Four.<|endoftext|>", " Yes.<|endoftext|>"]),
    "gemma": (WITH_SYSTEM, ["Four.<end_of_turn>", "Yes.<end_of_turn>"]),
    "gemma2": (TURNS, ["Four.<end_of_turn>", "Yes.<end_of_turn>"]),
    "phi3": (WITH_SYSTEM, ["Four.<|end|>", "Yes.<|end|>\n<|endoftext|>"]),
    "deepseek_r1": (WITH_SYSTEM, [f"Four.{DEEPSEEK_END}", f"Yes.{DEEPSEEK_END}"]),
    "harmony": (WITH_SYSTEM, [f"{FINAL}Four.<|end|>", f"{FINAL}Yes.<|return|>"]),
    "harmony calls": (CALLS, [HARMONY_CALL, f"{FINAL}Four.<|end|>", f"{FINAL}Yes.<|return|>"]),
    "harmony thoughts": (
        THOUGHTS, [HARMONY_CALL, f"{ANALYSIS}Easy.<|end|><|start|>assistant{FINAL}Four.<|return|>"]
    ),
    "harmony old thoughts": (
        OLD_THOUGHTS,
        [HARMONY_CALL, f"{FINAL}Four.<|end|>", f"{ANALYSIS}I am.<|end|><|start|>assistant{FINAL}Yes.<|return|>"],
    ),
    "qwen25": (WITH_SYSTEM, ["Four.<|im_end|>", "Yes.<|im_end|>"]),
    "qwen25 calls": (CALLS, [QWEN_CALL, "Four.<|im_end|>", "Yes.<|im_end|>"]),
    "qwen3": (TURNS, ["Four.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]),
    "qwen3 calls": (CALLS, [QWEN_CALL, "Four.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]),
    "qwen3 thoughts": (
        THOUGHTS,
        [f"<think>\nI add.\n</think>\n\n{QWEN_CALL}", "<think>\nEasy.\n</think>\n\nFour.<|im_end|>"],
    ),
    "qwen3 old thoughts": (
        OLD_THOUGHTS, [QWEN_CALL, "Four.<|im_end|>", "<think>\nI am.\n</think>\n\nYes.<|im_end|>"]
    ),
    "custom": (WITH_SYSTEM, ["Four.<|endoftext|>", "Yes.<|endoftext|>"]),
}  # fmt: skip
"""Template and case -> the conversation, and the supervised runs of tokens as text."""


@pytest.fixture
def tokenizer_of(make_tokenizer: MakeTokenizer, tmp_path: Path) -> Callable[[str], PreTrainedTokenizerFast]:
    """By the name of a template: ours, one of tests/build/templates, or `custom`, a file that a user wrote."""

    def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
        if name == "custom":
            (tmp_path / "own.jinja").write_text(CUSTOM)
            return make_tokenizer(read_template(str(tmp_path / "own.jinja")), SPECIALS)
        file = FOLDER / f"{name}.jinja"
        return make_tokenizer(read_template(str(file) if file.exists() else name), SPECIALS)

    return tokenizer_of


TokenizerOf = Callable[[str], PreTrainedTokenizerFast]


def supervised(tokenizer: PreTrainedTokenizerFast, row: Encoded | UnsuitedChat) -> list[str]:
    """The runs of supervised tokens, as text, read from the labels."""
    assert isinstance(row, Encoded), row
    edges = np.flatnonzero(np.diff(np.concatenate([[False], row.labels != IGNORED, [False]]).astype(int)))
    return [str(tokenizer.decode(row.labels[start:end].tolist())) for start, end in edges.reshape(-1, 2)]


def encode(tokenizer: PreTrainedTokenizerFast, chat: Chat, what: Supervise = Supervise.ASSISTANT) -> list[str]:
    (row,) = encode_chats(tokenizer, [chat], what)
    assert isinstance(row, Encoded), row
    tools, messages = list(chat.tools) or None, list(chat.messages)
    if not hasattr(chat_template_utils, "_REASONING_FIELDS"):  # transformers 5.17 leaves a thought under its one name
        thoughts = [message.get("reasoning_content") for message in messages]
        messages = [
            {**one, **({"thinking": thought} if thought else {})}
            for one, thought in zip(messages, thoughts, strict=True)
        ]
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    return supervised(tokenizer, row)


def test_there_are_ten() -> None:
    assert {name.split()[0] for name in EXPECTED} >= {*NAMES, "chatml", "gemma", "custom"}
    assert len({name.split()[0] for name in EXPECTED}) >= 10


@pytest.mark.parametrize("name", EXPECTED)
def test_answers_and_the_ends_of_their_turns_are_supervised(name: str, tokenizer_of: TokenizerOf) -> None:
    chat, expected = EXPECTED[name]
    assert encode(tokenizer_of(name.split()[0]), chat) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_the_last_turn_alone_and_all_behind_a_prompt(name: str, tokenizer_of: TokenizerOf) -> None:
    chat, expected = EXPECTED[name]
    tokenizer = tokenizer_of(name.split()[0])
    assert encode(tokenizer, chat, Supervise.LAST) == expected[-1:]
    from_second = Chat(chat.messages, chat.tools, prompt=chat.answers()[1])
    assert encode(tokenizer, from_second, Supervise.COMPLETION) == expected[1:]


@pytest.mark.parametrize("name", EXPECTED)
def test_ends_of_turns_are_supervised_where_they_are_the_padding(name: str, tokenizer_of: TokenizerOf) -> None:
    chat, expected = EXPECTED[name]
    tokenizer = tokenizer_of(name.split()[0])
    end = next(token for token in (*SPECIALS, "<|endoftext|>") if expected[0].endswith(token))
    tokenizer.pad_token = end
    assert encode(tokenizer, chat) == expected


@pytest.mark.parametrize("name", NAMES)
def test_plain_chats_are_rendered_as_transformers_renders_them(name: str, tokenizer_of: TokenizerOf) -> None:
    """Without walking through the messages first, and with the globals of the template in one mapping."""
    tokenizer = tokenizer_of(name)
    for chat in (TURNS, TURNS.through(1), TURNS.through(3), Chat([user(" a \n"), answer("\n b ")])):
        for prompt in (False, True):
            messages = list(chat.messages)
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert render(tokenizer, chat, prompt) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_an_answer_is_where_the_chat_up_to_it_ends(
    name: str, tokenizer_of: TokenizerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result read off the last answer equals that of rendering up to each answer."""
    chats = [Chat([*TURNS.messages, user(" And? "), answer(f"{text}")]) for text in ("Yes.", " Yes.\n", "Sure?")]
    tokenizer = tokenizer_of(name)
    short = encode_chats(tokenizer, chats)
    monkeypatch.setattr(labels, "_closing", lambda *_: "")
    for one, other in zip(short, encode_chats(tokenizer, chats), strict=True):
        assert isinstance(one, Encoded)
        assert isinstance(other, Encoded)
        assert one.labels.tolist() == other.labels.tolist()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_saved_tokenizer_renders_the_rows_identically(name: str, tokenizer_of: TokenizerOf, tmp_path: Path) -> None:
    chat, _ = EXPECTED[name]
    tokenizer = tokenizer_of(name.split()[0])
    tokenizer.save_pretrained(tmp_path / "final")
    assert render(AutoTokenizer.from_pretrained(tmp_path / "final"), chat) == render(tokenizer, chat)


def test_generation_blocks_of_chosen_turns(make_tokenizer: MakeTokenizer) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template, SPECIALS)
    assert encode(tokenizer, TURNS) == ["Four.<|im_end|>", "Yes.<|im_end|>"]
    assert encode(tokenizer, TURNS, Supervise.LAST) == ["Yes.<|im_end|>"]
    (row,) = encode_chats(tokenizer, [CALLS])
    assert "does not write the tool call" in str(row)


@pytest.mark.parametrize("name", ["chatml", "phi3", "deepseek_r1"])
def test_a_call_that_is_not_written_is_no_empty_answer(name: str, tokenizer_of: TokenizerOf) -> None:
    for what in (Supervise.ASSISTANT, Supervise.ALL):
        (row,) = encode_chats(tokenizer_of(name), [CALLS], what)
        assert isinstance(row, UnsuitedChat)
        assert str(row) == "the chat template does not write the tool call in message 3"


def test_what_a_template_leaves_out_is_reported(tokenizer_of: TokenizerOf) -> None:
    with_tools = Chat(TURNS.messages, TOOLS)
    (warning,) = check_chat(tokenizer_of("chatml"), [with_tools]).values()
    assert "does not write the `tools`" in warning
    speakers = Chat([{**message, "name": "Ann"} for message in TURNS.messages])
    (warning,) = check_chat(tokenizer_of("chatml"), [speakers]).values()
    assert "does not write the `name` of turns" in warning
    thinking = Chat([user("two?"), answer("Four.", thinking="Easy.")])
    for name, lost in (("chatml", {Remark.LOST_THOUGHT}), ("harmony", set()), ("qwen3", set())):
        (row,) = encode_chats(tokenizer_of(name), [thinking])
        assert isinstance(row, Encoded)
        assert row.remarks == lost
    assert check_chat(tokenizer_of("qwen25"), [with_tools]) == {}


LOSES = "{%% for m in messages if m.role != '%s' %%}{{ m.role }}: {{ m.content|upper }}\n{%% endfor %%}"


@pytest.mark.parametrize(
    "text", [LOSES % "assistant", LOSES.replace("m.content", "m.text") % "", "{{ messages|length }}"]
)
def test_an_answer_that_a_template_does_not_write_is_no_empty_one(text: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = text
    for what in (Supervise.ASSISTANT, Supervise.ALL):
        (row,) = encode_chats(tokenizer, [TURNS], what)
        assert str(row) == "the chat template does not write the answer in message 2"


@pytest.mark.parametrize(("dropped", "remarks"), [("system", {Remark.LOST_CONTENT}), ("", set())])
def test_other_content_that_a_template_drops_is_counted(
    dropped: str, remarks: set[Remark], tokenizer_of: TokenizerOf
) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = LOSES % dropped
    (row,) = encode_chats(tokenizer, [WITH_SYSTEM])
    assert isinstance(row, Encoded)
    assert row.remarks == remarks


def test_a_system_message_that_a_template_refuses_is_reported(tokenizer_of: TokenizerOf) -> None:
    (row,) = encode_chats(tokenizer_of("gemma2"), [WITH_SYSTEM])
    assert "System role not supported" in str(row)


def test_no_token_of_the_next_turn_is_supervised(tokenizer_of: TokenizerOf) -> None:
    """Phi-3 ends a chat, not a turn, in `<|endoftext|>`, which begins like the header of the next turn."""
    (row,) = encode_chats(tokenizer_of("phi3"), [TURNS])
    assert isinstance(row, Encoded)
    taken = row.labels[row.labels != IGNORED]
    assert tokenizer_of("phi3").convert_tokens_to_ids("<|user|>") not in taken

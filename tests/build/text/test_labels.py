"""Labels are read directly: which tokens of a rendered row are trained on, as text."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from framework.build.text.chat import Chat
from framework.build.text.labels import IGNORED, Encoded, UnsuitedChat, encode_chats, encode_texts
from framework.build.text.named_templates import TEMPLATES, read_template
from framework.schema.choices import Supervise

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure? It is four?"},
    {"role": "assistant", "content": "Yes, four."},
]

SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>",
)  # fmt: skip

MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template itself says what the assistant writes."""

MARKED_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if m['role'] == 'assistant' -%}{%- generation -%}{{ m['content'] | trim + '<|eot_id|>' }}{%- endgeneration -%}"
    "{%- else -%}{{ m['content'] | trim + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3 does: only the last answer has a thought; so a chat up to an earlier answer does not begin the whole."""

SYSTEM_LAST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.index >= messages | length - 1 and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's do: the system message moves to the last user turn."""

CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""As gpt-oss does: the last turn ends in another token than the ones before it."""

NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def supervised(tokenizer: PreTrainedTokenizerFast, row: Encoded | UnsuitedChat) -> list[str]:
    """The runs of supervised tokens, as text."""
    assert isinstance(row, Encoded), row
    assert row.input_ids.dtype == row.labels.dtype == np.int32
    taken = row.labels != IGNORED
    assert (row.labels[taken] == row.input_ids[taken]).all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], taken, [False]]).astype(int)))
    return [str(tokenizer.decode(row.input_ids[start:end].tolist())) for start, end in edges.reshape(-1, 2)]


def encode_one(tokenizer: PreTrainedTokenizerFast, chat: Sequence[dict[str, str]]) -> Encoded | UnsuitedChat:
    (row,) = encode_chats(tokenizer, [Chat(chat)])
    return row


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", ["Four.<|im_end|>", "Yes, four.<|im_end|>"]),
        (MARKED_CHATML, ["Four.<|im_end|>", "Yes, four.<|im_end|>"]),
        ("llama3", ["Four.<|eot_id|>", "Yes, four.<|eot_id|>"]),
        (MARKED_LLAMA3, ["Four.<|eot_id|>", "Yes, four.<|eot_id|>"]),
        ("mistral", [" Four.<|endoftext|>", " Yes, four.<|endoftext|>"]),
        ("gemma", ["Four.<end_of_turn>", "Yes, four.<end_of_turn>"]),
        ("plain", [" Four.<|endoftext|>", " Yes, four.<|endoftext|>"]),
        (THINKING, ["Four.<|im_end|>", "<think>\n\n</think>\n\nYes, four.<|im_end|>"]),
        (SYSTEM_LAST, [" Four.<|endoftext|>", " Yes, four.<|endoftext|>"]),
        (
            CHANNELS,
            ["<|channel|>final<|message|>Four.<|end|>", "<|channel|>final<|message|>Yes, four.<|return|>"],
        ),
        (NO_END, ["assistant: Four.\n", "assistant: Yes, four.\n"]),
    ],
)
def test_exactly_the_answers_and_their_ends_are_supervised(
    template: str, expected: list[str], make_tokenizer: MakeTokenizer
) -> None:
    named = (TEMPLATES / f"{template}.jinja").is_file() if len(template) < 20 else False
    tokenizer = make_tokenizer(read_template(template) if named else template, SPECIALS)
    assert supervised(tokenizer, encode_one(tokenizer, CHAT)) == expected


@pytest.mark.parametrize("template", ["chatml", "llama3", "mistral", "gemma", "plain"])
def test_whole_row_is_what_the_template_renders(template: str, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template(template), SPECIALS)
    row = encode_one(tokenizer, CHAT)
    assert isinstance(row, Encoded)
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=False)


def test_start_token_of_the_tokenizer_is_added_to_texts_and_not_to_chats(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("llama3"), SPECIALS)
    start, start_id = str(tokenizer.bos_token), tokenizer.bos_token_id
    processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, start_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    row = encode_one(tokenizer, CHAT)
    assert isinstance(row, Encoded)
    assert row.input_ids[:2].tolist() == [start_id, tokenizer.get_vocab()["<|start_header_id|>"]]
    (text,) = encode_texts(tokenizer, ["The"])
    assert text.input_ids[0] == start_id
    assert text.labels[:2].tolist() == [IGNORED, text.input_ids[1]]


def test_everything_can_be_supervised(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), SPECIALS)
    (row,) = encode_chats(tokenizer, [Chat(CHAT)], Supervise.ALL)
    assert isinstance(row, Encoded)
    assert row.labels[0] == IGNORED
    assert (row.labels[1:] == row.input_ids[1:]).all()


def test_end_of_turn_is_supervised_where_it_is_also_the_padding(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), SPECIALS)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    row = encode_one(tokenizer, CHAT[:3])
    assert supervised(tokenizer, row) == ["Four.<|im_end|>"]


def test_the_side_the_tokenizer_pads_on_changes_nothing(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), SPECIALS)
    right = encode_chats(tokenizer, [Chat(CHAT), Chat(CHAT[:3])])
    tokenizer.padding_side = "left"
    left = encode_chats(tokenizer, [Chat(CHAT), Chat(CHAT[:3])])
    for one, other in zip(left, right, strict=True):
        assert isinstance(one, Encoded)
        assert isinstance(other, Encoded)
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()


@pytest.mark.parametrize("answer", ["", "a", "assistant", "<think>", " two words ", "four\n\n", "漢字 🦊"])
def test_answers_that_look_like_something_else(answer: str, make_tokenizer: MakeTokenizer) -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": answer}, CHAT[3], {"role": "assistant", "content": answer}]
    for template in (read_template("chatml"), MARKED_CHATML):
        tokenizer = make_tokenizer(template, SPECIALS)
        assert supervised(tokenizer, encode_one(tokenizer, chat)) == [f"{answer}<|im_end|>"] * 2
    tokenizer = make_tokenizer(THINKING, SPECIALS)
    first, last = supervised(tokenizer, encode_one(tokenizer, chat))
    assert first == f"{answer}<|im_end|>"
    assert last.endswith(f"{answer}<|im_end|>")


def test_chat_that_begins_with_an_answer(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), SPECIALS)
    assert supervised(tokenizer, encode_one(tokenizer, CHAT[2:4])) == ["Four.<|im_end|>"]


def test_chat_without_an_answer_learns_nothing(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), SPECIALS)
    assert supervised(tokenizer, encode_one(tokenizer, CHAT[:2])) == []


def test_a_chat_that_cannot_be_rendered_says_why_and_spoils_no_other(make_tokenizer: MakeTokenizer) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = make_tokenizer(strict + read_template("chatml"), SPECIALS)
    refused, fine = encode_chats(tokenizer, [Chat(CHAT), Chat(CHAT[1:])])
    assert isinstance(refused, UnsuitedChat)
    assert "no system role" in str(refused)
    assert supervised(tokenizer, fine) == ["Four.<|im_end|>", "Yes, four.<|im_end|>"]


def test_an_answer_that_the_template_rewrites_is_refused(make_tokenizer: MakeTokenizer) -> None:
    shouting = "{% for m in messages %}{{ m['content'] | upper }}{{ messages | length }}{% endfor %}"
    row = encode_one(make_tokenizer(shouting), CHAT)
    assert isinstance(row, UnsuitedChat)
    assert "message 3" in str(row)


def test_texts_are_supervised_from_the_second_token_to_the_end_token(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    plain, ended = encode_texts(tokenizer, ["The quick brown fox", "The quick<|endoftext|>"])
    assert plain.input_ids.tolist() == [*tokenizer("The quick brown fox")["input_ids"], end]
    assert ended.input_ids.tolist() == [*tokenizer("The quick")["input_ids"], end]
    for row in (plain, ended):
        assert row.labels.tolist() == [IGNORED, *row.input_ids[1:].tolist()]

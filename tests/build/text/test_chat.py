import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from framework.build.text import chat, limits
from framework.build.text.chat import Chat, check_chat, render
from framework.build.text.labels import encode_chats
from framework.build.text.limits import OutOfTime, limited, watched
from framework.build.text.messages import read_messages
from framework.build.text.named_templates import read_template, template_names
from framework.errors import RequestError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
CHAT = Chat(MESSAGES)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two and two?<|im_end|>\n"
    "<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
    "llama3": "<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is two and two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>",
    "mistral": "<|endoftext|>[INST] Be brief.\n\nWhat is two and two? [/INST] Four.<|endoftext|>"
    "[INST] Sure? [/INST] Yes.<|endoftext|>",
    "gemma": "<|endoftext|><start_of_turn>user\nBe brief.\n\nWhat is two and two?<end_of_turn>\n"
    "<start_of_turn>model\nFour.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
    "<start_of_turn>model\nYes.<end_of_turn>\n",
    "plain": "<|endoftext|>System: Be brief.\nUser: What is two and two?\nAssistant: Four.<|endoftext|>\n"
    "User: Sure?\nAssistant: Yes.<|endoftext|>\n",
    "alpaca": "<|endoftext|>Be brief.\n\n"
    "### Instruction:\nWhat is two and two?\n\n### Response:\nFour.<|endoftext|>\n\n"
    "### Instruction:\nSure?\n\n### Response:\nYes.<|endoftext|>\n\n",
    "vicuna": "<|endoftext|>Be brief. USER: What is two and two? ASSISTANT: Four.<|endoftext|>"
    "USER: Sure? ASSISTANT: Yes.<|endoftext|>",
    "zephyr": "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nWhat is two and two?<|endoftext|>\n"
    "<|assistant|>\nFour.<|endoftext|>\n<|user|>\nSure?<|endoftext|>\n<|assistant|>\nYes.<|endoftext|>\n",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat is two and two?<|end|>\n"
    "<|assistant|>\nFour.<|end|>\n<|user|>\nSure?<|end|>\n<|assistant|>\nYes.<|end|>\n",
}
"""Output of each named template for CHAT if the start and end token are both `<|endoftext|>`."""

PROMPT_ENDS = {
    "chatml": "Sure?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[INST] Sure? [/INST]",
    "gemma": "<start_of_turn>model\n",
    "plain": "Sure?\nAssistant:",
    "alpaca": "Sure?\n\n### Response:\n",
    "vicuna": "USER: Sure? ASSISTANT:",
    "zephyr": "Sure?<|endoftext|>\n<|assistant|>\n",
    "phi3": "Sure?<|end|>\n<|assistant|>\n",
}


def test_every_named_template_is_listed_here() -> None:
    assert template_names() == sorted(RENDERED) == sorted(PROMPT_ENDS)


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_named_templates_write_what_their_models_were_made_with(name: str, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template(name))
    assert render(tokenizer, CHAT) == RENDERED[name]
    prompt = render(tokenizer, CHAT.through(4), generation_prompt=True)
    assert prompt.endswith(PROMPT_ENDS[name])
    assert RENDERED[name].startswith(prompt)


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_saved_template_renders_the_same_rows(name: str, make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(read_template(name))
    tokenizer.save_pretrained(tmp_path)
    assert render(AutoTokenizer.from_pretrained(tmp_path), CHAT) == render(tokenizer, CHAT)


def test_a_sound_template_has_no_warnings(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(read_template("chatml"), CHATML_TOKENS)
    assert check_chat(tokenizer, [CHAT, Chat(MESSAGES[1:3]), CHAT.through(4), CHAT.through(1)]) == {}


def test_no_template_is_refused_with_what_to_write(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        check_chat(make_tokenizer(), [CHAT])
    (problem,) = caught.value.problems
    assert problem.key == "model.chat_template"
    assert problem.expected is not None
    assert ", ".join(template_names()) in problem.expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ raise_exception('only user and assistant') }}", "only user and assistant"),
        ("{{ messages[0]['content'] + '\\ud800' }}", "which is not a character"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ '%1000000000d' % 1 }}", "a format as wide as"),
        ("{{ '%1000000000d'|format(1) }}", "a format as wide as"),
        ("{{ '%*d' % (1000000000, 1) }}", "would produce more than 100,000"),
        ("{{ '{:>1000000000}'.format(1) }}", "a format as wide as"),
        ("{{ '{:>{w}}'.format(1, w=1000000000) }}", "would produce more than 100,000"),
        ("{{ 'a' * 1000000000 }}", "would produce more than 10,000,000 characters"),
        ("{{ [0] * 1000000000 }}", "would produce more than 10,000,000 characters"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{{ 'a'.ljust(1000000000) }}", "would produce more than 100,000"),
        ("{{ (1).to_bytes(1000000000, 'big') }}", "would produce more than 100,000"),
        ("{{ 'a'|center(1000000000) }}", "would produce more than 100,000"),
        ("{{ [1]|tojson(indent=1000000000) }}", "would produce more than 100,000"),
        ("{{ [1]|batch(1000000000, 0)|list }}", "would produce more than 100,000"),
        ("{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "would produce more than 10,000,000"),
        ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "would produce more than 10,000,000"),
        ("{{ range(100000)|join('b' * 100000) }}", "would produce more than 1,000 characters"),
        ("{{ ('b' * 100000).join(['a'] * 100000) }}", "would produce more than 1,000 characters"),
        ("{{ (['a' * 100000] * 100000)|join }}", "would produce more than 10,000,000"),
        (
            "{% set s = namespace(n=9) %}{% for i in range(99) %}{% set s.n = s.n * s.n %}{% endfor %}",
            "would produce more than 4,096 bits",
        ),
        ("{{" + "(" * 10_000 + "1" + ")" * 10_000 + "}}", "maximum recursion depth exceeded"),
        ("{% if 1 %}" * 5_000 + "{% endif %}" * 5_000, "maximum recursion depth exceeded"),
        ("{{ '%c' % 99999999 }}", "not in range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ 9 ** 99999999 }}", "would produce more than 4,096 bits"),
        (
            "{% for i in range(300) %}{% for j in range(300) %}{{ 'x' }}{% endfor %}{% endfor %}",
            "it writes 90,000 char",
        ),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
            "takes more than 0.25 s to render",
        ),
    ],
)
def test_template_that_does_not_render_is_refused(
    template: str, message: str, make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.25)
    with pytest.raises(RequestError, match=message) as caught:
        check_chat(make_tokenizer(template), [CHAT])
    assert caught.value.problems[0].key == "model.chat_template"


@pytest.mark.parametrize("sum_", ["s.a ~ s.a", "s.a + s.a", "[s.a, s.a]|string"])
def test_a_template_that_doubles_a_text_ends(
    sum_: str, make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES", 2**27)
    monkeypatch.setattr(limits, "TICKS", 50)
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.25)
    template = f"{{% set s = namespace(a='a') %}}{{% for i in range(40) %}}{{% set s.a = {sum_} %}}{{% endfor %}}"
    with pytest.raises(RequestError, match=r"takes more than (0.125 GiB of memory|0.25 s) to render"):
        check_chat(make_tokenizer(template), [CHAT])


def test_bounded_steps_do_what_they_do(make_tokenizer: MakeTokenizer) -> None:
    template = (
        "{{ 7 * 6 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ '%05.2f' % 3.14159 }} {{ '{:>4}'.format(7) }} "
        "{{ [1, 2]|join('+') }} {{ {'a': 'é'}|tojson(indent=1) }} {{ 'aXa'.replace('X', 'b') }} "
        "{{ 'x'|indent(2, true) }} {{ 9 % 4 }}"
        " {{ 'ab'|format }} {{ 12345678901|string }} {{ [3, 1]|sort|first }} {{ {'a': 1}|dictsort|list }}"
    )
    expected = '42 --- 1024 03.14    7 1+2 {\n "a": "é"\n} aba   x 1 ab 12345678901 1 [(\'a\', 1)]'
    assert render(make_tokenizer(template), CHAT) == expected


def test_warns_when_the_prompt_differs_from_the_rows(make_tokenizer: MakeTokenizer) -> None:
    thinking = read_template("chatml").replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")
    warnings = [*check_chat(make_tokenizer(thinking, CHATML_TOKENS), [CHAT, CHAT]).values()]
    assert len(warnings) == 1
    assert "<think>" in warnings[0]


def test_warns_when_the_end_of_turn_is_made_of_text(make_tokenizer: MakeTokenizer) -> None:
    (warning,) = check_chat(make_tokenizer(read_template("chatml")), [CHAT]).values()
    assert "<|im_end|>" in warning
    assert "not a special token" in warning
    other = Chat([*MESSAGES[:-1], {"role": "assistant", "content": "Indeed."}])
    assert check_chat(make_tokenizer(read_template("chatml")), [CHAT, other]) == {"end": warning}, (
        "once, whatever the row"
    )


def test_warns_when_generation_blocks_leave_the_end_out(make_tokenizer: MakeTokenizer) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (warning,) = check_chat(make_tokenizer(template, CHATML_TOKENS), [CHAT]).values()
    assert "leaves out '<|im_end|>'" in warning


def test_a_template_that_is_slow_for_each_row_ends_after_a_second(
    make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TRIED_SECONDS", 0.25)
    slow = "{% for i in range(300) %}{% for j in range(300) %}{% set x = j %}{% endfor %}{% endfor %}"
    tokenizer = make_tokenizer(slow + read_template("chatml"), CHATML_TOKENS)
    started = time.thread_time()
    with pytest.raises(RequestError, match="to render the conversation that begins with 'Be brief"):
        encode_chats(tokenizer, [CHAT] * 10_000)
    assert time.thread_time() - started < 4


def test_the_limit_leaves_the_signal_as_it_was() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with watched(0.05):
        with pytest.raises(OutOfTime):
            limited(lambda: sum(1 for _ in itertools.count()))
        assert limited(lambda: 3) == 3
        for _ in range(2_000_000):  # many short calls may take longer than one may
            pass
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


WRITES_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}ARGUMENTS{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ call.function.name + call.function.arguments }}", 'f{"city": "K\u00f6ln"}'),  # adds them, as DeepSeek's do
        ("{{ call.function.name }}{{ call.function.arguments }}", 'f{"city": "K\u00f6ln"}'),  # would print Python
        ("{{ call.function.name }}{{ call.function.arguments | tojson }}", 'f{"city": "K\u00f6ln"}'),
        ("f{% for name, value in call.function.arguments.items() %}{{ name + value }}{% endfor %}", "fcityK\u00f6ln"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [{"city": "K\u00f6ln"}, '{"city":"K\\u00f6ln"}'])
def test_arguments_are_a_text_or_an_object_as_the_template_wants(
    written: str, expected: str, arguments: object, make_tokenizer: MakeTokenizer
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = read_messages([MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [call]}])
    tokenizer = make_tokenizer(WRITES_CALLS.replace("ARGUMENTS", written), CHATML_TOKENS)
    assert f"assistant\n{expected}<|im_end|>" in render(tokenizer, Chat(messages))


@pytest.mark.parametrize(("other", "ours"), [("llama-3", "llama3"), ("ChatML", "chatml"), ("phi_35", "phi3")])
def test_names_of_other_tools_are_understood(other: str, ours: str) -> None:
    assert read_template(other) == read_template(ours)


def test_a_name_that_means_the_tokenizers_own_is_answered_with_unset() -> None:
    with pytest.raises(RequestError, match="unset, which is the tokenizer's own"):
        read_template("tokenizer_default")

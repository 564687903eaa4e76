"""The limit for every row format: nothing longer reaches a batch, and what that costs is counted to the token."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import Data, prepare_data
from framework.build.data.rows import Row
from framework.build.text.format_table import FORMATS
from framework.build.text.labels import IGNORED
from framework.build.text.named_templates import read_template
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat, Supervise
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]

ASKED = {"role": "user", "content": "What is two and two?"}
FOUR = {"role": "assistant", "content": "Four."}
END = "<|endoftext|>"
TURN = "<|im_end|>"


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(read_template("chatml"), ("<|im_start|>", TURN))


@pytest.fixture
def prepare(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Data]:
    def prepare(rows: Sequence[Mapping[str, Any]], task: str, limit: int, vocab: int = 400, **data: Any) -> Data:
        written = {
            "training": training_for(task, rows),
            "model": {"model_max_length": limit},
            "data": {"train": [{"path": write_rows("a.jsonl", rows)}], **data},
        }
        return prepare_data(TrainingConfig.model_validate(written), tokenizer, vocab)

    return prepare


Prepare = Callable[..., Data]


def training_for(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judged answers are what the loss `kto` learns from."""
    judged = task == "preference" and any("label" in row for row in rows)
    return {"task": task, "preference": {"loss_type": "kto"}} if judged else {"task": task}


def refused(prepare: Prepare, *args: Any, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        prepare(*args, **options)
    return caught.value.problems


def words(count: int) -> str:
    """A text of as many tokens: `<|im_start|>` is one."""
    return "<|im_start|>" * count


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("sft", {"text": words(99)}),
    "messages": ("sft", {"messages": [ASKED, {"role": "assistant", "content": words(99)}]}),
    "sharegpt": ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": words(99)}]}),
    "alpaca": ("sft", {"instruction": "a", "output": words(99)}),
    "prompt_completion": ("sft", {"prompt": "a", "completion": words(99)}),
    "preference": ("preference", {"prompt": "a", "chosen": words(9), "rejected": words(99)}),
    "unpaired": ("preference", {"prompt": "a", "completion": words(99), "label": True}),
    "labelled": ("classification", {"text": words(99), "label": 1}),
    "tokens": ("sft", {"input_ids": [7] * 99}),
}
"""Format -> its task, and a row of it that is too long."""


class TestTruncation:
    """Truncation, dropping and their counts, for every format."""

    def test_every_form_is_here(self) -> None:
        assert set(LONG) == {str(row_format) for row_format in RowFormat}

    @pytest.mark.parametrize("row_format", LONG)
    @pytest.mark.parametrize("policy", ["left", "right"])
    def test_no_row_is_longer_than_the_limit(self, row_format: str, policy: str, prepare: Prepare) -> None:
        task, row = LONG[row_format]
        for packing in (False, *([True] if task == "sft" else [])):
            data = prepare([row] + [_short(row)] * 60, task, limit=40, truncation=policy, packing=packing)
            assert data.report.train.lengths["1.0"] > 90
            for kept in data.train:
                assert len(kept["input_ids"]) <= 40
                assert len(kept.get("rejected", kept)["input_ids"]) <= 40
            assert data.report.train.cut == 1
            supervised_tokens = sum(_supervised(kept) for kept in data.train)
            assert data.report.train.supervised - data.report.train.supervised_lost == supervised_tokens

    @pytest.mark.parametrize("row_format", LONG)
    def test_dropped_or_refused(self, row_format: str, prepare: Prepare) -> None:
        task, row = LONG[row_format]
        rows = [row, *[_short(row)] * 60]
        data = prepare(rows, task, limit=40, truncation="drop")
        assert data.report.train.dropped == {"longer than 40 tokens": 1}
        (problem,) = refused(prepare, rows, task, limit=40, truncation="error")
        assert "tokens and the limit is 40 (data.truncation: error)" in problem.message
        assert str(problem.where).endswith("a.jsonl:1")

    @pytest.mark.parametrize("row_format", LONG)
    def test_a_token_that_the_model_does_not_have(self, row_format: str, prepare: Prepare) -> None:
        task, row = LONG[row_format]
        ids = {"input_ids": [5, 7, 6]} if row_format == "tokens" else row
        vocab = 7 if row_format == "tokens" else 306
        (problem,) = refused(prepare, [ids], task, 512, vocab=vocab)
        highest = {"tokens": 7, "messages": 307, "sharegpt": 307, "alpaca": 307}.get(row_format, 306)
        assert problem.message == f"token id {highest} is outside the model's vocabulary of {vocab}"
        assert str(problem.where).endswith("a.jsonl:1")

    @pytest.mark.parametrize(
        "row_format", ["messages", "sharegpt", "alpaca", "prompt_completion", "preference", "unpaired"]
    )
    def test_a_row_whose_answer_is_cut_off_never_reaches_a_batch(self, row_format: str, prepare: Prepare) -> None:
        task, row = LONG[row_format]
        asked = {"messages": [{**ASKED, "content": words(98)}, FOUR], "prompt": words(98), "instruction": words(98)}
        asked["conversations"] = [{"from": "human", "value": words(98)}, {"from": "gpt", "value": "b"}]
        long_prompt = _short({**row, **{name: value for name, value in asked.items() if name in row}})
        data = prepare([long_prompt, *[_short(row)] * 9], task, limit=40)
        assert data.report.train.dropped == {"no supervised token within 40 tokens": 1}
        assert data.report.train.supervised_lost > 0
        (problem,) = refused(prepare, [long_prompt], task, limit=40)
        assert "planned optimizer steps: 0" in problem.message

    def test_a_pair_of_which_one_answer_is_cut_off_is_dropped(self, prepare: Prepare) -> None:
        short = {"prompt": "a", "chosen": "b", "rejected": "c"}
        rows = [{"prompt": [ASKED], "chosen": [FOUR], "rejected": [{**ASKED, "content": words(99)}, FOUR]}]
        data = prepare([*rows, *[short] * 99], "preference", 60, truncation="right")
        assert data.report.train.dropped == {"no supervised token within 60 tokens": 1}

    @pytest.mark.parametrize(("policy", "kept"), [("right", "ab"), ("left", "cd")])
    def test_of_texts_as_a_whole_the_special_tokens_stay(
        self, policy: str, kept: str, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        start, middle, end = "<|im_start|>", TURN, END
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {middle} $B {end}",
            special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, middle, end)],
        )
        rows = [
            {"text": "abcd", "text_pair": "abcd", "label": 0},
            {"text": "a", "text_pair": "abcd", "label": 0},
            {"text": "abcdabcd", "text_pair": "a", "label": 0},
            {"text": "abcd", "label": 0},
        ]
        data = prepare(rows, "classification", limit=7, truncation=policy)
        longer = {"ab": "abc", "cd": "bcd"}[kept]
        assert [tokenizer.decode(row["input_ids"]) for row in data.train] == [
            f"{start}{kept}{middle}{kept}{end}",
            f"{start}a{middle}{longer}{end}",
            f"{start}{longer if policy == 'right' else 'bcd'}{middle}a{end}",
            f"{start}abcd{end}",
        ]
        assert data.report.train.cut == 3


class TestSupervise:
    @pytest.mark.parametrize("row_format", LONG)
    @pytest.mark.parametrize("supervise", Supervise)
    def test_what_a_format_cannot_do_is_refused_by_name(
        self, row_format: str, supervise: Supervise, prepare: Prepare
    ) -> None:
        task, row = LONG[row_format]
        rows = [_short(row)] * 2
        if supervise in FORMATS[RowFormat(row_format)].supervise:
            assert len(prepare(rows, task, 200, supervise=str(supervise)).train) == 2
            return
        (problem,) = refused(prepare, rows, task, 200, supervise=str(supervise))
        assert problem.key == "data.supervise"
        assert f"`{supervise}` " in problem.message
        assert f"2 rows of `{row_format}`" in problem.message


@pytest.mark.parametrize("row_format", LONG)
def test_a_slow_tokenizer_serves_texts_and_tokens(
    row_format: str, prepare: Prepare, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    task, row = LONG[row_format]
    if row_format in ("text", "tokens"):
        assert len(prepare([_short(row)], task, 200).train) == 1
        return
    (problem,) = refused(prepare, [_short(row)], task, 200)
    assert (problem.key, problem.expected) == ("model.tokenizer_name", "a tokenizer with a tokenizer.json")


class TestFaults:
    """Every value is checked, and the message has file, row and column."""

    @pytest.mark.parametrize(
        ("task", "row", "message"),
        [
            ("sft", {"text": 3}, "column `text`: expected text, not int 3"),
            ("sft", {"messages": [{"role": "user"}]}, "column `messages`: message 1: there is no `content`"),
            ("sft", {"messages": [{**FOUR, "name": 3}]}, "message 1: `name`: expected text, not int 3"),
            ("sft", {"messages": [{**FOUR, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
             "column `messages`: message 1: the arguments of call 1: not JSON"),
            ("sft", {"messages": [{**FOUR, "function_call": {"name": "f"}}]}, "no template uses `function_call`"),
            ("sft", {"messages": [FOUR], "tools": "[1]"}, "column `tools`: expected a list of tools, not str '[1]'"),
            ("sft", {"messages": [FOUR], "tools": "{"}, "column `tools`: a list of tools: not JSON"),
            ("sft", {"conversations": [{"from": "alien", "value": "x"}]},
             "column `conversations`: turn 1: `from`: 'alien' is not a known role; known are system, human"),
            ("sft", {"conversations": [{"from": "gpt"}]}, "column `conversations`: turn 1: there is no `value`"),
            ("sft", {"instruction": 1, "output": "x"}, "column `instruction`: expected text, not int 1"),
            ("sft", {"instruction": "x", "output": "x", "input": ["y"]}, "column `input`: expected text, not list"),
            ("sft", {"prompt": 1, "completion": "x"}, "column `prompt`: expected text, not int 1"),
            ("sft", {"prompt": "x", "completion": [3]},
             "column `completion`: message 1: expected {role: .., content: ..}"),
            ("preference", {"chosen": "x", "rejected": 2}, "column `rejected`: expected text, not int 2"),
            ("preference", {"prompt": "x", "completion": "y", "label": 2}, "column `label`: expected true or false"),
            ("classification", {"text": "x", "label": {"a": 1}}, "column `label`: expected a class name, a number"),
            ("classification", {"text": ["x"], "label": 1}, "column `text`: expected text, not list"),
            ("regression", {"text": "x", "label": float("nan")}, "column `label`: expected a finite number, not nan"),
            ("sft", {"text": "x\ud83e"}, "is not a character"),
            ("sft", {"messages": [{**FOUR, "tool_calls": [{"name": "x\ud83e", "arguments": {}}]}]},
             "is not a character"),
        ],
    )  # fmt: skip
    def test_with_their_place(self, task: str, row: Mapping[str, Any], message: str, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [row], task, 200)
        assert message in problem.message
        assert str(problem.where).endswith("a.jsonl:1")


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every long answer made short."""
    text = (
        json.dumps(row).replace(words(99), words(2)) if "input_ids" not in row else json.dumps({"input_ids": [7] * 9})
    )
    short: dict[str, Any] = json.loads(text)
    return short


def _supervised(row: Row) -> int:
    if "target" in row and all(label == IGNORED for label in row["labels"]):
        return 1
    own = sum(label != IGNORED for label in row["labels"])
    return own + (_supervised(row["rejected"]) if "rejected" in row else 0)

"""Rows of every format, from a file to tokens: detected columns, supervised tokens, and refused rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import Data, prepare_data, training_texts
from framework.build.data.rows import Row
from framework.build.text.format_table import FORMATS
from framework.build.text.labels import IGNORED
from framework.build.text.messages import read_messages
from framework.build.text.named_templates import read_template
from framework.build.text.row_formats import KINDS, tasks_for
from framework.errors import Problem, RequestError
from framework.schema.choices import RowFormat
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]

ASKED = {"role": "user", "content": "What is two and two?"}
FOUR = {"role": "assistant", "content": "Four."}
FIVE = {"role": "assistant", "content": "Five."}
AGAIN = {"role": "user", "content": "Sure?"}
YES = {"role": "assistant", "content": "Yes."}
END = "<|endoftext|>"
TURN = "<|im_end|>"


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(read_template("chatml"), ("<|im_start|>", TURN))


@pytest.fixture
def prepare(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Data]:
    def prepare(rows: Sequence[Mapping[str, Any]], task: str = "sft", base: Any = None, **data: Any) -> Data:
        source = {"path": write_rows("a.jsonl", rows)}
        source |= {name: data.pop(name) for name in ("format", "columns") if name in data}
        written = {
            "training": training_for(task, rows),
            "model": {"model_max_length": data.pop("limit", 512)},
            "data": {"train": [source], **data},
        }
        return prepare_data(TrainingConfig.model_validate(written), base or tokenizer, vocab_size=400)

    return prepare


Prepare = Callable[..., Data]


def training_for(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judged answers are what the loss `kto` learns from."""
    judged = task == "preference" and any("label" in row for row in rows)
    return {"task": task, "preference": {"loss_type": "kto"}} if judged else {"task": task}


def supervised(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    """The supervised tokens as text; a bar where some are left out."""
    runs, ids, labels = [""], row["input_ids"], row["labels"]
    for token, label in zip(ids, labels, strict=True):
        if label != IGNORED:
            runs[-1] += str(tokenizer.decode([label]))
        elif runs[-1]:
            runs.append("")
        assert label in (token, IGNORED)
    return "|".join(run for run in runs if run)


def refused(prepare: Prepare, rows: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        prepare(rows, *args, **options)
    return caught.value.problems


class TestDetection:
    @pytest.mark.parametrize(
        ("row", "task", "row_format"),
        [
            ({"text": "The fox"}, "sft", "text"),
            ({"text": "The fox", "label": 1}, "sft", "text"),
            ({"text": "The fox", "label": 1}, "classification", "labelled"),
            ({"sentence": "The fox", "label": 0.5}, "regression", "labelled"),
            ({"messages": [ASKED, FOUR], "text": "x"}, "sft", "messages"),
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sft", "sharegpt"),
            ({"prompt": "a", "completion": "b"}, "sft", "prompt_completion"),
            ({"prompt": "a", "completion": "b", "label": True}, "sft", "prompt_completion"),
            ({"prompt": "a", "completion": "b", "label": True}, "preference", "unpaired"),
            ({"instruction": "a", "input": "", "output": "b", "text": "x"}, "sft", "alpaca"),
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", "preference"),
            ({"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, "reward", "preference"),
            ({"text": "x", "input_ids": [1, 2, 3]}, "sft", "tokens"),
        ],
    )
    def test_by_columns_and_task(self, row: Mapping[str, Any], task: str, row_format: str, prepare: Prepare) -> None:
        (description,) = prepare([row, row], task).report.sources
        assert description.endswith(f"2 rows of `{row_format}` (found by its columns)")

    def test_every_form_has_a_task_and_says_what_may_be_supervised(self) -> None:
        assert all(tasks_for(row_format) for row_format in RowFormat)
        assert set(FORMATS) == set(RowFormat)
        assert all(KINDS.values())

    @pytest.mark.parametrize(
        ("row", "task", "message"),
        [
            (
                {"chosen": "a", "rejected": "b"},
                "sft",
                "rows of `preference` are for the task preference or reward, and the task is sft; "
                "the columns are: chosen, rejected",
            ),
            ({"text": "a", "label": 1}, "reward", "rows of `labelled` are for the task classification or regression"),
            ({"input_ids": [1, 2]}, "preference", "rows of `tokens` are for the task sft or pretrain or distillation"),
        ],
    )
    def test_rows_for_another_task_say_which(
        self, row: Mapping[str, Any], task: str, message: str, prepare: Prepare
    ) -> None:
        (problem,) = refused(prepare, [row], task)
        assert message in problem.message
        assert str(problem.where).endswith("a.jsonl:1")

    def test_a_form_that_is_set_wins(self, prepare: Prepare) -> None:
        rows = [{"text": "The quick", "messages": [ASKED, FOUR]}]
        assert "`text` (as set)" in prepare(rows, format="text").report.sources[0]
        assert len(prepare(rows, format="text").train[0]["input_ids"]) < len(prepare(rows).train[0]["input_ids"])

    def test_columns_of_every_form_may_be_called_otherwise(
        self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        rows = [{"q": "two and two?", "a": " It is four."}]
        data = prepare(rows, columns={"prompt": "q", "completion": "a"})
        assert supervised(tokenizer, data.train[0]) == f" It is four.{END}"

    def test_a_column_that_the_form_does_not_read_is_not_mapped_in_silence(self, prepare: Prepare) -> None:
        rows = [{"text": "x", "body": "y"}]
        (problem,) = refused(prepare, rows, format="text", columns={"prompt": "body"})
        assert problem.message == "rows of `text` have no column `prompt`; they may have text"
        (problem,) = refused(prepare, [{"messages": [ASKED, FOUR]}], columns={"tools": "functions"})
        assert "there is no column `functions`" in problem.message


class TestPromptCompletion:
    def test_texts_end_to_end(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        (row,) = prepare([{"prompt": "What is two?", "completion": " It is four."}]).train
        assert tokenizer.decode(row["input_ids"]) == f"What is two? It is four.{END}"
        assert supervised(tokenizer, row) == f" It is four.{END}"

    def test_a_token_of_both_is_warned_about(self, prepare: Prepare) -> None:
        (warning,) = prepare([{"prompt": "What? ", "completion": "It is four."}] * 2).report.warnings
        assert "are one token, ' It'" in warning
        assert prepare([{"prompt": "What?", "completion": " It is four."}]).report.warnings == ()

    @pytest.mark.parametrize(
        ("prompt", "completion"),
        [([ASKED, FOUR, AGAIN], [YES]), ([ASKED, FOUR, AGAIN], "Yes."), ("Sure?", [YES])],
    )
    def test_messages(
        self, prompt: object, completion: object, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        (row,) = prepare([{"prompt": prompt, "completion": completion}]).train
        assert supervised(tokenizer, row) == f"Yes.{TURN}"
        chat = [AGAIN, YES] if prompt == "Sure?" else [ASKED, FOUR, AGAIN, YES]
        assert row["input_ids"] == tokenizer.apply_chat_template(chat, return_dict=False)

    @pytest.mark.parametrize(
        ("supervise", "expected"),
        [
            ("assistant", f"Four.{TURN}|Yes.{TURN}"),
            ("last", f"Yes.{TURN}"),
            ("completion", f"Yes.{TURN}"),
            ("all", None),
        ],
    )
    def test_supervised(
        self, supervise: str, expected: str | None, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        rows = [{"prompt": [ASKED, FOUR, AGAIN], "completion": [YES]}]
        (row,) = prepare(rows, supervise=supervise).train
        whole = tokenizer.decode(row["input_ids"][1:])
        assert supervised(tokenizer, row) == (expected or whole)
        assert len(prepare(rows, "pretrain").train[0]["input_ids"]) == 1 + sum(
            label != IGNORED for label in prepare(rows, "pretrain").train[0]["labels"]
        )


class TestAlpaca:
    ROWS = ({"instruction": "Add.", "input": "2 and 2", "output": "It is four.", "system": "Be brief."},)

    def test_as_a_chat_where_there_is_a_template(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        (row,) = prepare(self.ROWS).train
        assert tokenizer.decode(row["input_ids"]) == (
            f"<|im_start|>system\nBe brief.{TURN}\n<|im_start|>user\nAdd.\n2 and 2{TURN}\n"
            f"<|im_start|>assistant\nIt is four.{TURN}\n"
        )
        assert supervised(tokenizer, row) == f"It is four.{TURN}"

    def test_as_the_text_of_alpaca_where_there_is_none(self, prepare: Prepare, make_tokenizer: MakeTokenizer) -> None:
        base = make_tokenizer()
        given = {**self.ROWS[0], "system": None}
        rows = prepare([given, {**given, "input": None}], base=base).train
        assert base.decode(rows[0]["input_ids"]) == (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n"
            f"### Response:\nIt is four.{END}"
        )
        assert base.decode(rows[1]["input_ids"]) == (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            f"\n\n### Instruction:\nAdd.\n\n### Response:\nIt is four.{END}"
        )
        assert [supervised(base, row) for row in rows] == [f"It is four.{END}"] * 2


class TestShareGPT:
    def test_turns_are_messages(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        turns = [("system", "Be brief."), ("human", "two?"), ("gpt", "Four."), ("user", "Sure?"), ("gpt", "Yes.")]
        rows = [{"conversations": [{"from": who, "value": value} for who, value in turns]}]
        (row,) = prepare(rows).train
        roles = ("system", "user", "assistant", "user", "assistant")
        chat = [{"role": role, "content": value} for role, (_, value) in zip(roles, turns, strict=True)]
        assert row["input_ids"] == tokenizer.apply_chat_template(chat, return_dict=False)
        assert supervised(tokenizer, row) == f"Four.{TURN}|Yes.{TURN}"
        (row,) = prepare(rows, supervise="last").train
        assert supervised(tokenizer, row) == f"Yes.{TURN}"

    def test_messages_under_that_name_are_taken(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        (row,) = prepare([{"conversations": [ASKED, FOUR], "system": "Be brief."}]).train
        assert supervised(tokenizer, row) == f"Four.{TURN}"
        assert "Be brief." in tokenizer.decode(row["input_ids"])


class TestPreference:
    @pytest.mark.parametrize(
        "row",
        [
            {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]},
            {"prompt": [ASKED], "chosen": "Four.", "rejected": "Five."},
            {"prompt": ASKED["content"], "chosen": [FOUR], "rejected": [FIVE]},
            {"prompt": ASKED["content"], "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
            {"prompt": [ASKED], "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
            {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
        ],
    )
    def test_every_spelling_gives_the_same_pair(
        self, row: Mapping[str, Any], prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        (pair,) = prepare([row], "preference").train
        assert pair["input_ids"] == tokenizer.apply_chat_template([ASKED, FOUR], return_dict=False)
        assert pair["rejected"]["input_ids"] == tokenizer.apply_chat_template([ASKED, FIVE], return_dict=False)
        assert supervised(tokenizer, pair) == f"Four.{TURN}"
        assert supervised(tokenizer, pair["rejected"]) == f"Five.{TURN}"

    @pytest.mark.parametrize(
        ("row", "chosen"),
        [
            ({"prompt": "two? ", "chosen": "Four.", "rejected": "Five."}, "Four."),
            ({"chosen": "two? Four.", "rejected": "two? Five."}, " Four."),
            ({"chosen": "\n\nHuman: two?\n\nAssistant: It is 4", "rejected": "\n\nHuman: two?\n\nAssistant: It is 5"},
             " It is 4"),
            ({"chosen": "Four.", "rejected": "Five."}, "our."),
        ],
    )  # fmt: skip
    def test_texts(
        self, row: Mapping[str, Any], chosen: str, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        (pair,) = prepare([row], "preference").train
        assert supervised(tokenizer, pair) == chosen + END

    def test_kinds_that_cannot_be_compared(self, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"chosen": "a", "rejected": [FOUR]}], "preference")
        assert "differ in kind" in problem.message

    def test_judged_answers(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        rows = [
            {"prompt": [ASKED], "completion": [FOUR], "label": True},
            {"prompt": [ASKED], "completion": [FIVE], "label": False},
        ]
        good, bad = prepare(rows, "preference").train
        assert (good["target"], bad["target"]) == ([1.0], [0.0])
        assert supervised(tokenizer, bad) == f"Five.{TURN}"
        (problem,) = refused(prepare, [{**rows[0], "label": "good"}], "preference")
        assert problem.message == "column `label`: expected true or false, not str 'good'"


TOOLS = [{"type": "function", "function": {"name": "adding", "parameters": {"type": "object"}}}]
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "adding", "arguments": '{"a": 2}'}}]}
RESULT = {"role": "tool", "name": "adding", "content": "4"}


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("sft", {"messages": [ASKED, CALLED, RESULT, FOUR]}),
        ("sft", {"conversations": [ASKED, CALLED, RESULT, FOUR]}),
        ("sft", {"prompt": [ASKED, CALLED, RESULT], "completion": [FOUR]}),
        ("preference", {"prompt": [ASKED, CALLED, RESULT], "chosen": [FOUR], "rejected": [FIVE]}),
        ("preference", {"prompt": [ASKED, CALLED, RESULT], "completion": [FOUR], "label": True}),
    ],
)
def test_tools_and_calls_reach_the_template(
    task: str, row: Mapping[str, Any], tools: object, prepare: Prepare, make_tokenizer: MakeTokenizer
) -> None:
    template = (Path(__file__).parent.parent / "templates" / "qwen25.jinja").read_text()
    base = make_tokenizer(template, ("<|im_start|>", TURN))
    (found,) = prepare([{**row, "tools": tools}], task, base=base).train
    text = base.decode(found["input_ids"])
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert '<tool_call>\n{"name": "adding", "arguments": {"a": 2}}\n</tool_call>' in text
    assert "<tool_response>\n4\n</tool_response>" in text
    assert supervised(base, found).endswith(f"Four.{TURN}")


class TestLabelled:
    @pytest.mark.parametrize(
        ("labels", "names", "targets"),
        [
            (["sad", "glad", "sad"], ("glad", "sad"), [[1], [0], [1]]),
            ([2, 0, 1], ("0", "1", "2"), [[2], [0], [1]]),
            (["10", "9", "1"], ("1", "9", "10"), [[2], [1], [0]]),
            ([True, False], ("false", "true"), [[1], [0]]),
            ([["a", "b"], [], ["c"]], ("a", "b", "c"), [[1, 1, 0], [0, 0, 0], [0, 0, 1]]),
        ],
    )
    def test_classes_are_the_names_that_occur(
        self, labels: list[Any], names: tuple[str, ...], targets: list[list[float]], prepare: Prepare
    ) -> None:
        data = prepare([{"text": "The fox", "label": label} for label in labels], "classification")
        assert data.targets is not None
        assert data.targets.names == names
        assert data.targets.several is isinstance(labels[0], list)
        assert [row["target"] for row in data.train] == targets
        assert all(label == IGNORED for row in data.train for label in row["labels"])

    def test_classes_that_are_given_keep_their_order(self, prepare: Prepare) -> None:
        rows = [{"text": "The fox", "label": label} for label in ("b", 0)]
        data = prepare(rows, "classification", labels=["c", "b", "a"])
        assert [row["target"] for row in data.train] == [[1], [0]]
        (problem,) = refused(prepare, [{"text": "x", "label": "bb"}], "classification", labels=["c", "b", "a"])
        assert problem.message == "column `label`: 'bb' is not one of the classes (c, b, a); did you mean b?"
        assert str(problem.where).endswith("a.jsonl:1")

    @pytest.mark.parametrize("label", [-1, 0.5, -0.5])
    def test_what_is_no_class(self, label: float, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"text": "x", "label": 1}, {"text": "x", "label": label}], "classification")
        assert f"{label} is not a class" in problem.message
        assert str(problem.where).endswith("a.jsonl:2")

    def test_whole_numbers_that_a_table_made_floats(self, prepare: Prepare) -> None:
        data = prepare([{"text": "x", "label": label} for label in (2.0, 0.0, 1)], "classification")
        assert data.targets is not None
        assert data.targets.names == ("0", "1", "2")

    def test_one_class_among_several_is_refused(self, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"text": "x", "label": [1]}, {"text": "x", "label": 1}], "classification")
        assert "expected a list of classes, as in the first row" in problem.message

    @pytest.mark.parametrize(
        ("labels", "targets"), [([0.5, -1], [[0.5], [-1]]), (["0.5"], [[0.5]]), ([[1, 2.5]], [[1, 2.5]])]
    )
    def test_values(self, labels: list[Any], targets: list[list[float]], prepare: Prepare) -> None:
        data = prepare([{"text": "The fox", "label": label} for label in labels], "regression")
        assert [row["target"] for row in data.train] == targets
        assert data.targets is not None
        assert (data.targets.names, data.targets.size) == ((), len(targets[0]))

    def test_values_that_are_none(self, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"text": "x", "label": "tall"}], "regression")
        assert problem.message == "column `label`: expected a finite number (of float32), not str 'tall'"

    def test_pairs_have_what_the_tokenizer_puts_around_them(
        self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        (row,) = prepare([{"sentence1": "The fox", "sentence2": "jumps", "label": 0}], "classification").train
        assert row["input_ids"] == tokenizer("The fox", "jumps")["input_ids"]

    def test_rows_without_a_label_are_counted_as_empty(self, prepare: Prepare) -> None:
        data = prepare([{"text": "x", "label": 1}, {"text": "x", "label": None}], "classification")
        assert data.report.train.dropped == {"empty": 1}


class TestTokens:
    def test_labels_pass_unchanged(self, prepare: Prepare) -> None:
        (row,) = prepare([{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 9]}]).train
        assert row == {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 9]}

    def test_without_labels_every_token_is_supervised_and_none_is_added(self, prepare: Prepare) -> None:
        (row,) = prepare([{"input_ids": [5, 6, 7]}]).train
        assert row == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}

    def test_padding_is_left_out(self, prepare: Prepare) -> None:
        rows = [{"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, -100, 6, -100]}]
        assert prepare(rows).train[0] == {"input_ids": [5, 6], "labels": [-100, 6]}

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "tokens between others are masked"),
            ({"input_ids": [1, 2, 3], "labels": [1]}, "column `labels`: 1 number for 3 tokens"),
            ({"input_ids": [1, -2]}, "column `input_ids`: -2 is no token id"),
            ({"input_ids": [1, 2], "labels": [1, -1]}, "column `labels`: -1 is neither a token id nor -100"),
            ({"input_ids": [1, 2.5]}, "expected a list of whole numbers, not float 2.5 in it"),
            ({"input_ids": [1, True]}, "expected a list of whole numbers, not bool True in it"),
            ({"input_ids": "1 2"}, "expected a list of whole numbers, not str '1 2'"),
            ({"input_ids": [1, 400]}, "token id 400 is outside the model's vocabulary of 400"),
            ({"input_ids": [1, 2], "labels": [1, 400]}, "label 400 is outside the model's vocabulary of 400"),
        ],
    )
    def test_what_is_no_row_of_tokens(self, row: Mapping[str, Any], message: str, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"input_ids": [1, 2, 3]}, row])
        assert message in problem.message
        assert str(problem.where).endswith("a.jsonl:2")

    def test_the_limit_holds(self, prepare: Prepare) -> None:
        data = prepare([{"input_ids": list(range(1, 21))}, {"input_ids": [1, 2]}], limit=12)
        assert data.train.lengths.tolist() == [12, 2]
        assert data.report.train.supervised_lost == 8


def test_texts_in_parts_are_the_text(prepare: Prepare) -> None:
    halves = [{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur."}]
    whole = prepare([{"messages": [ASKED, FOUR]}]).train
    assert list(prepare([{"messages": [ASKED, {"role": "assistant", "content": halves}]}]).train) == list(whole)
    (problem,) = refused(prepare, [{"messages": [ASKED, {**FOUR, "content": [{"type": "text"}]}]}])
    assert "message 2: there is no `text`" in problem.message


def test_pairs_that_teach_nothing_are_left_out(prepare: Prepare) -> None:
    long = "word " * 40
    rows = [
        {"prompt": "q ", "chosen": "yes", "rejected": "no"},
        {"prompt": "q ", "chosen": "yes", "rejected": "yes"},
        {"prompt": "q ", "chosen": f"{long}yes", "rejected": f"{long}no"},
    ]
    found = prepare([*rows, *rows[:1] * 150], "preference", limit=32).report.train
    assert found.dropped == {"the same answer twice": 1, "the same answer twice within 32 tokens": 1}
    assert found.supervised_lost > 40
    half = prepare(rows[:2], "preference").report
    assert half.warnings == ("data.train: 50% of the rows of train are left out: both answers of a pair are the same",)


def test_a_mapped_column_that_is_not_there_is_reported_before_the_form_it_leaves(prepare: Prepare) -> None:
    for columns, near in (({"label": "lable"}, "label"), ({"text": "txt"}, "text")):
        (problem,) = refused(prepare, [{"text": "a b", "label": "x"}], "classification", columns=columns)
        (name,) = columns.values()
        assert f"there is no column `{name}`; the columns are: text, label" in problem.message
        assert problem.nearest == near
    (problem,) = refused(prepare, [{"text": "a b", " label": "x"}], "classification")
    assert problem.nearest == "columns: {label:  label}"


def test_a_tokenizer_can_be_built_on_rows_of_every_format(write_rows: WriteRows) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "preference": [{"prompt": "one ", "chosen": [FOUR], "rejected": [FIVE]}],
        "classification": [{"text": "one", "text_pair": "two", "label": "three"}],
        "sft": [{"instruction": "one", "output": "two"}],
    }
    found = {}
    for task, some in rows.items():
        written = {"training": {"task": task}, "data": {"train": [{"path": write_rows(f"{task}.jsonl", some)}]}}
        found[task] = sorted(training_texts(TrainingConfig.model_validate(written)))
    assert found == {
        "preference": ["Five.", "Four.", "one "],
        "classification": ["one", "two"],
        "sft": ["one", "two"],
    }


def test_a_thought_and_a_name_with_a_call_without_content_are_kept() -> None:
    (kept,) = read_messages([{**CALLED, "reasoning_content": "I add.", "name": None}])
    assert kept["reasoning_content"] == "I add."
    assert kept["content"] == ""
    (kept,) = read_messages([{"role": "tool", "content": "4", "tool_call_id": "1"}])
    assert kept == {"role": "tool", "content": "4", "tool_call_id": "1"}

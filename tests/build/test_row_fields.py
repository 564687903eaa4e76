"""Every field of a row is used, refused, or named as not read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import Data, prepare_data
from framework.build.text.labels import IGNORED
from framework.build.text.named_templates import read_template
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]
Prepare = Callable[..., Data]

ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FOLDER = Path(__file__).parent / "templates"


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(read_template("chatml"), ("<|im_start|>", "<|im_end|>"))


@pytest.fixture
def prepare(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> Prepare:
    def prepare(
        rows: Sequence[Mapping[str, Any]] | str, task: str = "sft", base: Any = None, columns: Any = None, **data: Any
    ) -> Data:
        path = rows if isinstance(rows, str) else write_rows("a.jsonl", rows)
        written = {
            "training": {"task": task},
            "model": {"model_max_length": 512},
            "data": {"train": [{"path": path, "columns": columns or {}}], **data},
        }
        return prepare_data(TrainingConfig.model_validate(written), base or tokenizer)

    return prepare


def rendered(data: Data, tokenizer: PreTrainedTokenizerFast, index: int = 0) -> str:
    return str(tokenizer.decode(data.train[index]["input_ids"]))


def supervised(data: Data, tokenizer: PreTrainedTokenizerFast, index: int = 0) -> list[str]:
    """The supervised passages of a row, as text."""
    row, found = data.train[index], list[list[int]]()
    for at, label in enumerate(row["labels"]):
        if label != IGNORED:
            if not at or row["labels"][at - 1] == IGNORED:
                found.append([])
            found[-1].append(label)
    return [str(tokenizer.decode(part)) for part in found]


def refused(prepare: Prepare, *args: Any, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        prepare(*args, **options)
    return caught.value.problems


class TestTurns:
    """A turn may say that it is not supervised."""

    @pytest.mark.parametrize("switch", [{"weight": 0}, {"train": False}, {"training": 0.0}, {"loss": False}])
    def test_in_every_form_of_chats(
        self, switch: dict[str, Any], prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        off, last = {**ANSWER, **switch}, {"role": "assistant", "content": "b"}
        turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **switch}]
        for row in (
            {"messages": [ASKED, off, ASKED, last]},
            {"conversations": [*turns, turns[0], {"from": "gpt", "value": "b", "loss": True}]},
            {"prompt": [ASKED], "completion": [off, ASKED, last]},
        ):
            assert supervised(prepare([row]), tokenizer) == ["b<|im_end|>"]
        better, worse = [off, ASKED, last], [off, ASKED, {"role": "assistant", "content": "c"}]
        pair = prepare([{"prompt": [ASKED], "chosen": better, "rejected": worse}], "preference")
        assert supervised(pair, tokenizer) == ["b<|im_end|>"]

    def test_under_all_the_rest_is_supervised(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        row = {"messages": [{**ASKED, "weight": 0}, {**ANSWER, "weight": 0}, {"role": "user", "content": "r"}, ANSWER]}
        found = "".join(supervised(prepare([row], supervise="all"), tokenizer))
        assert "user\nq" not in found
        assert found.count("a<|im_end|>") == 1
        assert "user\nr<|im_end|>" in found

    def test_a_row_of_which_nothing_is_left_is_dropped(self, prepare: Prepare) -> None:
        row = {"messages": [ASKED, {**ANSWER, "weight": 0}]}
        report = prepare([row, {"messages": [ASKED, ANSWER]}]).report.train
        assert (report.kept, report.dropped) == (1, {"no supervised token": 1})

    @pytest.mark.parametrize("value", [0.5, 2, "0", "false", [0]])
    def test_other_values_are_refused_with_row_and_turn(self, value: Any, prepare: Prepare) -> None:
        (problem,) = refused(
            prepare, [{"messages": [ASKED, ANSWER]}, {"messages": [ASKED, {**ANSWER, "weight": value}]}]
        )
        assert problem.message.startswith("column `messages`: message 2: `weight`: expected 0 or 1")
        assert str(problem.where).endswith(":2")

    def test_two_that_differ_are_refused(self, prepare: Prepare) -> None:
        (problem,) = refused(prepare, [{"messages": [ASKED, {**ANSWER, "weight": 1, "loss": False}]}])
        assert "`weight` and `loss` contradict each other" in problem.message

    def test_a_turn_of_the_user_that_asks_for_it_is_counted(self, prepare: Prepare) -> None:
        rows = [{"messages": [{**ASKED, "train": True}, ANSWER]}, {"messages": [{**ASKED, "weight": 1}, ANSWER]}]
        (warning,) = prepare(rows).report.warnings
        assert warning.startswith("data.train: 1 of 2 rows of train (50.0 %) have turns marked for training")


class TestColumns:
    @pytest.mark.parametrize(
        ("row", "task"),
        [
            ({"messages": [ASKED, ANSWER]}, "sft"),
            ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sft"),
            ({"prompt": [ASKED], "completion": "a"}, "sft"),
            ({"prompt": "q", "completion": [ANSWER]}, "sft"),
            ({"instruction": "q", "output": "a"}, "sft"),
            ({"prompt": [ASKED], "chosen": "a", "rejected": "b"}, "preference"),
            ({"chosen": [ASKED, ANSWER], "rejected": [ASKED, {**ANSWER, "content": "b"}]}, "reward"),
        ],
    )
    def test_a_system_prompt_in_a_column(
        self, row: dict[str, Any], task: str, prepare: Prepare, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        text = rendered(prepare([{**row, "system": "Be brief."}], task), tokenizer)
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>")
        assert rendered(prepare([{**row, "system": None}], task), tokenizer) in text

    def test_two_system_prompts(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        own = [{"role": "system", "content": "Be brief."}, ASKED, ANSWER]
        assert rendered(prepare([{"messages": own, "system": "Be brief."}]), tokenizer).count("Be brief.") == 1
        (problem,) = refused(prepare, [{"messages": own, "system": "Be long."}])
        assert "another system prompt" in problem.message

    def test_a_text_has_no_place_for_one(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        row = {"prompt": "q", "completion": "a", "system": "Be brief."}
        (problem,) = refused(prepare, [row])
        assert "columns: {instruction: prompt, output: completion}" in problem.message
        columns = {"instruction": "prompt", "output": "completion"}
        assert "Be brief." in rendered(prepare([row], columns=columns), tokenizer)

    def test_functions_are_tools(self, prepare: Prepare, make_tokenizer: MakeTokenizer) -> None:
        base = make_tokenizer((FOLDER / "qwen25.jinja").read_text(), ("<|im_start|>", "<|im_end|>"))
        function = {"name": "add", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        one, other = (
            rendered(prepare([{"messages": [ASKED, ANSWER], name: value}], base=base), base)
            for name, value in (("functions", [function]), ("tools", tools))
        )
        assert one == other
        assert '"name": "add"' in one

    def test_earlier_turns_of_an_alpaca_row(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        row = {"instruction": "q3", "input": "i", "output": "a3", "history": [["q1", "a1"], ["q2", "a2"]]}
        turns = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"), ("user", "q3\ni")]
        expected = "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in [*turns, ("assistant", "a3")])
        data = prepare([row])
        assert rendered(data, tokenizer) == expected
        assert supervised(data, tokenizer) == ["a3<|im_end|>"]
        every = supervised(prepare([row], supervise="assistant"), tokenizer)
        assert every == ["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]

    def test_earlier_turns_need_a_template(self, prepare: Prepare, make_tokenizer: MakeTokenizer) -> None:
        row = {"instruction": "q", "output": "a", "history": [["q", "a"]]}
        (problem,) = refused(prepare, [row], base=make_tokenizer())
        assert problem.key == "model.chat_template"
        (problem,) = refused(prepare, [{**row, "history": ["q", "a"]}])
        assert "column `history`: expected a list of [question, answer]" in problem.message

    def test_pairs_as_llamafactory_has_them(self, prepare: Prepare, tokenizer: PreTrainedTokenizerFast) -> None:
        answers = {"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}
        first = prepare([{"conversations": [{"from": "human", "value": "q"}], **answers}], "preference")
        answers = {"chosen": ANSWER, "rejected": {**ANSWER, "content": "b"}}
        second = prepare([{"messages": [ASKED], **answers}], "preference")
        third = prepare([{"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}], "preference")
        plain = prepare([{"prompt": [ASKED], "chosen": [ANSWER], "rejected": [answers["rejected"]]}], "preference")
        fourth = prepare([{"input": "q", "chosen": "a", "rejected": "b"}], "preference")
        assert [row.train[0] for row in (first, second, third, fourth)] == [plain.train[0]] * 4

    def test_an_instruction_next_to_a_prompt_is_named_as_not_read(self, prepare: Prepare) -> None:
        row = {"prompt": "p ", "instruction": "i", "input": "", "chosen": "a", "rejected": "b"}
        (names,) = prepare([row], "preference").report.train.unread.values()
        assert names == ["`instruction`"], "an empty column says nothing"


class TestNotRead:
    def test_other_columns_and_fields_are_named_once(self, prepare: Prepare) -> None:
        rows: list[dict[str, Any]] = [
            {"messages": [ASKED, ANSWER], "id": 1},
            {"messages": [ASKED, {**ANSWER, "refusal": None}], "id": 2, "source": "x"},
            {"messages": [ASKED, {**ANSWER, "refusal": "no"}], "id": 3},
        ]
        (names,) = prepare(rows).report.train.unread.values()
        assert names == ["`id`", "`source`", "`refusal` of turns"]
        assert "not read of" in str(prepare(rows).report)
        assert str(prepare(rows).report).count("`id`") == 1

    def test_columns_that_are_chosen_are_read(self, prepare: Prepare) -> None:
        report = prepare([{"body": "x", "text": "y"}], columns={"text": "body"}).report.train
        assert [*report.unread.values()] == [["`text`"]]
        assert prepare([{"text": "y"}]).report.train.unread == {}


class TestArrow:
    ARGUMENTS: Sequence[dict[str, Any]] = ({"city": "A"}, {"n": 1}, {"city": None})

    def rows(self, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
        return [{"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]

    def test_keys_that_a_struct_adds_stay_absent(
        self, prepare: Prepare, make_tokenizer: MakeTokenizer, tmp_path: Path
    ) -> None:
        base = make_tokenizer((FOLDER / "qwen25.jinja").read_text(), ("<|im_start|>", "<|im_end|>"))
        pq.write_table(pa.Table.from_pylist(self.rows(self.ARGUMENTS[:2])), tmp_path / "a.parquet")
        written, table = prepare(self.rows(self.ARGUMENTS), base=base), prepare(str(tmp_path / "a.parquet"), base=base)
        assert list(table.train) == list(written.train)[:2]
        assert '"arguments": {"n": 1}' in rendered(table, base, 1)
        assert '"arguments": {"city": null}' in rendered(written, base, 2)  # as it was written

    def test_dates_that_python_cannot_hold(self, prepare: Prepare, tmp_path: Path) -> None:
        far = pa.array([253402300800000000, 2**63 - 1], pa.timestamp("us"))  # the year 10000, PostgreSQL's infinity
        nested = pa.array([{"at": 1}, {"at": 2**63 - 1}], pa.struct([("at", pa.timestamp("us"))]))
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": ["a", "b"], "far": far, "nested": nested}), path)
        assert prepare(str(path)).report.train.kept == 2
        first, second = refused(prepare, str(path), columns={"text": "far"})
        assert "expected text, not timestamp[us] out of Python's range" in first.message
        assert (first.where, second.where) == (f"{path}:1", f"{path}:2")


class TestRemarks:
    def test_empty_answers_from_one_in_a_hundred_on(self, prepare: Prepare) -> None:
        empty, full = {"messages": [ASKED, {**ANSWER, "content": " "}]}, {"messages": [ASKED, ANSWER]}
        (warning,) = prepare([empty] * 10 + [full] * 30).report.warnings
        assert warning.startswith("data.train: 10 of 40 rows of train (25.0 %) have an empty answer")
        assert len(prepare([empty] + [full] * 99).report.warnings) == 1
        few = prepare([empty] + [full] * 100).report
        assert few.warnings == ()
        assert "1 row with an empty answer" in str(few)
        bare = prepare([{"prompt": "q", "completion": " "}, *[{"prompt": "q", "completion": "a"}] * 3]).report
        assert bare.warnings[0].startswith("data.train: 1 of 4 rows of train (25.0 %) have an empty answer")

    def test_a_call_or_an_answer_that_is_not_supervised_is_no_empty_one(self, prepare: Prepare) -> None:
        off = {"messages": [ASKED, {**ANSWER, "content": "", "weight": 0}, ASKED, ANSWER]}
        assert prepare([off]).report.warnings == ()

    @pytest.mark.parametrize("inline", [False, True])
    def test_thoughts_of_earlier_turns(self, inline: bool, prepare: Prepare, make_tokenizer: MakeTokenizer) -> None:
        def thinking(thought: str, text: str) -> dict[str, Any]:
            if inline:
                return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}"}
            return {"role": "assistant", "content": text, "reasoning_content": thought}

        base = make_tokenizer((FOLDER / "qwen3.jinja").read_text(), ("<|im_start|>", "<|im_end|>"))
        long = {"messages": [ASKED, thinking("first thought", "a"), ASKED, thinking("second thought", "b")]}
        short = {"messages": [ASKED, thinking("one thought", "a")]}
        data = prepare([short, short, short, short, long], base=base)
        assert "first thought" not in rendered(data, base, 4)
        assert "second thought" in rendered(data, base, 4)
        (warning,) = data.report.warnings
        assert warning.startswith("data.train: 1 of 5 rows of train (20.0 %) have reasoning, usually of earlier turns")


def test_as_json(prepare: Prepare) -> None:
    report = prepare([{"messages": [ASKED, {**ANSWER, "content": ""}], "id": 1}]).report.to_json()
    assert json.loads(json.dumps(report))["train"]["remarks"] == {
        "an empty answer: only the end of the turn is supervised": 1
    }

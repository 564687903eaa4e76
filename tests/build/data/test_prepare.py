from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import Data, prepare_data, training_texts
from framework.build.data.rows import Rows
from framework.build.text.labels import IGNORED
from framework.build.text.named_templates import read_template
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    """ChatML. Texts made by `words` are one token a word."""
    tokenizer = make_tokenizer(read_template("chatml"), ("<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([f"<{letter}>" for letter in LETTERS])
    return tokenizer


def words(count: int, letter: str = "a") -> str:
    return f"<{letter}>" * count


def chat(prompt: int, answer: int) -> dict[str, Any]:
    """About `prompt` + 10 tokens before the answer, then `answer` + 1 supervised ones and a line break."""
    return {
        "messages": [{"role": "user", "content": words(prompt)}, {"role": "assistant", "content": words(answer, "b")}]
    }


def config(train: str | Sequence[str], limit: int = 64, **data: Any) -> TrainingConfig:
    training = data.pop("training", {})
    paths = [train] if isinstance(train, str) else train
    return TrainingConfig.model_validate(
        {
            "training": training,
            "model": {"model_max_length": limit},
            "data": {"train": [{"path": path} for path in paths], **data},
        }
    )


def refused(config: TrainingConfig, tokenizer: PreTrainedTokenizerFast, **options: int) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        prepare_data(config, tokenizer, **options)
    return caught.value.problems


def supervised(rows: Rows) -> list[int]:
    return [sum(label != IGNORED for label in row["labels"]) for row in rows]


class TestTruncation:
    """The limit holds on every path, and everything it costs is counted."""

    def test_one_answer_cut_off_is_dropped_and_counted(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [*[chat(10, 9)] * 7, chat(100, 9)])
        data = prepare_data(config(path), tokenizer)
        assert len(data.train) == 7
        assert supervised(data.train) == [10] * 7
        report = data.report.train
        assert (report.read, report.kept, report.cut) == (8, 7, 0)
        assert report.dropped == {"no supervised token within 64 tokens": 1}
        length = len(tokenizer.apply_chat_template(chat(100, 9)["messages"], return_dict=False))
        assert f"the first: {path}:8 has {length} tokens: no supervised token" in str(report)
        assert (report.supervised, report.supervised_lost) == (80, 10)
        assert data.report.warnings == (
            "data.train: 12.5% of the supervised tokens of train are lost to the limit of 64 tokens "
            "(0 of 8 rows cut, 1 dropped)",
        )

    def test_all_answers_cut_off_is_an_error_naming_row_length_and_limit(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [chat(100, 9)] * 8)
        (problem,) = refused(config(path, training={"per_device_train_batch_size": 4}), tokenizer)
        length = len(tokenizer.apply_chat_template(chat(100, 9)["messages"], return_dict=False))
        assert problem.key == "data.train"
        for part in (
            "planned optimizer steps: 0",
            "8 rows read, 8 dropped (8 no supervised token within 64 tokens), 0 kept; a step takes 4",
            f"{path}:1 has {length} tokens",
        ):
            assert part in problem.message

    def test_the_healthy_control_keeps_everything(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        data = prepare_data(config(write_rows("a.jsonl", [chat(100, 9)] * 8), limit=128), tokenizer)
        assert len(data.train) == 8
        assert data.report.train.supervised_lost == data.report.train.tokens_lost == 0
        assert data.report.warnings == ()

    def test_partly_cut_answers_are_counted_to_the_token(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [{"text": words(9)}] * 9 + [{"text": words(99)}])
        data = prepare_data(config(path, limit=64), tokenizer)
        report = data.report.train
        # 9 x (9 words + end), 1 x (99 words + end); of each row the first token is not supervised.
        assert (report.tokens, report.supervised) == (190, 180)
        assert (report.cut, report.tokens_lost, report.supervised_lost) == (1, 36, 36)
        assert report.first_cut == f"{path}:10 has 100 tokens"
        assert report.lengths == {"0.0": 10, "0.5": 10, "0.9": 100, "0.95": 100, "0.99": 100, "1.0": 100}
        assert data.train.lengths.max() == 64
        assert tokenizer.eos_token_id not in data.train[9]["input_ids"]
        text = str(data.report)
        assert "cut 1 row (10.0 %); lost 18.9 % of the tokens, 20.0 % of the supervised tokens" in text
        assert "shortest 10, median 10" in text

    def test_losing_more_than_half_is_refused_with_the_length_to_set(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [{"text": words(299)}] * 20)
        (problem,) = refused(config(path), tokenizer)
        assert problem.key == "model.model_max_length"
        assert "78.9% of the supervised tokens of train are lost" in problem.message
        assert problem.expected is not None
        assert "at least 300" in problem.expected
        assert "training.task=pretrain" in problem.expected

    @pytest.mark.parametrize(("policy", "first"), [("left", "<b>"), ("right", "<a>")])
    def test_side_that_is_cut(
        self, policy: str, first: str, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [{"text": words(40) + words(40, "b")}, *[{"text": words(60)}] * 9])
        data = prepare_data(config(path, limit=41, truncation=policy), tokenizer)
        assert tokenizer.decode(data.train[0]["input_ids"][:1]) == first
        assert {len(row["input_ids"]) for row in data.train} == {41}

    def test_drop(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": words(30)}] * 9 + [{"text": words(99)}])
        data = prepare_data(config(path, truncation="drop"), tokenizer)
        assert len(data.train) == 9
        assert data.report.train.dropped == {"longer than 64 tokens": 1}
        assert data.report.train.supervised_lost == 99

    def test_error_names_every_long_row(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": words(n)} for n in (10, 99, 20, 88)])
        found = refused(config(path, truncation="error"), tokenizer)
        assert [problem.where for problem in found] == [f"{path}:2", f"{path}:4"]
        assert "the row has 100 tokens and the limit is 64" in found[0].message

    @pytest.mark.parametrize("task", ["sft", "pretrain"])
    @pytest.mark.parametrize("row", [{"text": words(640)}, chat(600, 40), chat(5, 640)])
    def test_one_row_ten_times_the_limit_never_reaches_a_batch(
        self, task: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        short = {"text": words(20)} if "text" in row else chat(5, 20)
        path = write_rows("a.jsonl", [*[short] * 99, row])
        data = prepare_data(config(path, training={"task": task}), tokenizer)
        assert data.train.lengths.max() <= 64
        assert all(count > 0 for count in supervised(data.train))

    def test_the_limit_is_exactly_the_one_set(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": words(n)} for n in (2999, 2000)])
        for limit, longest in ((2048, 2048), (8192, 3000)):
            data = prepare_data(config(path, limit=limit), tokenizer)
            assert data.train.lengths.max() == longest
            assert data.report.train.limit == limit


class TestPretraining:
    def test_long_documents_are_split_and_nothing_is_lost(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [{"text": words(200)}, {"text": words(10)}])
        data = prepare_data(config(path, training={"task": "pretrain"}), tokenizer)
        report = data.report.train
        assert (report.read, report.split, report.cut, report.tokens_lost) == (2, 1, 0, 0)
        assert report.kept == len(data.train) == 5
        assert sum(supervised(data.train)) == report.supervised == 200 + 10
        assert data.train[3]["input_ids"][-1] == tokenizer.eos_token_id
        assert "no packing" in str(data.report)

    def test_every_token_of_a_chat_is_supervised(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [chat(5, 5)])
        (row,) = prepare_data(config(path, training={"task": "pretrain"}), tokenizer).train
        assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


class TestChecks:
    def test_ids_beyond_the_vocabulary_are_named(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        highest = tokenizer.get_vocab()["<b>"]
        path = write_rows("a.jsonl", [{"text": words(5)}, {"text": words(2) + words(2, "b")}])
        (problem,) = refused(config(path), tokenizer, vocab_size=highest)
        assert problem.where == f"{path}:2"
        assert f"token id {highest} is outside the model's vocabulary of {highest}" in problem.message
        assert len(prepare_data(config(path), tokenizer, vocab_size=highest + 1).train) == 2

    def test_empty_rows_are_dropped_and_counted(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        texts = write_rows("a.jsonl", [{"text": "x"}, {"text": ""}, {"text": None}, {}])
        chats = write_rows("b.jsonl", [chat(1, 1), {"messages": []}, {"messages": chat(1, 1)["messages"][:1]}])
        data = prepare_data(config([texts, chats]), tokenizer)
        assert len(data.train) == 2
        assert data.report.train.dropped == {"empty": 4, "no supervised token": 1}
        assert data.report.sources == (
            f"{texts}: 4 rows of `text` (found by its columns)",
            f"{chats}: 3 rows of `messages` (found by its columns)",
        )

    def test_chats_without_a_template(self, make_tokenizer: MakeTokenizer, write_rows: WriteRows) -> None:
        (problem,) = refused(config(write_rows("a.jsonl", [chat(1, 1)])), make_tokenizer())
        assert problem.key == "model.chat_template"

    def test_a_chat_that_the_template_refuses_is_named(
        self, make_tokenizer: MakeTokenizer, write_rows: WriteRows
    ) -> None:
        template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        strict = make_tokenizer(template + read_template("chatml"))
        path = write_rows("a.jsonl", [*[chat(1, 1)] * 4, {"messages": chat(1, 1)["messages"][1:]}])
        (problem,) = refused(config(path), strict)
        assert problem.where == f"{path}:5"
        assert "user first" in problem.message

    def test_a_left_padding_tokenizer_is_mentioned_and_obeyed_nowhere(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [chat(1, 1), chat(9, 9)])
        right = prepare_data(config(path), tokenizer)
        tokenizer.padding_side = "left"
        left = prepare_data(config(path), tokenizer)
        assert left.train.labels.tolist() == right.train.labels.tolist()
        assert right.report.notes == ()
        assert "pads on the left" in left.report.notes[0]

    def test_pad_that_is_the_end_token_is_still_supervised(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        tokenizer.pad_token = tokenizer.eos_token
        path = write_rows("a.jsonl", [{"text": words(3)}, {"text": words(5)}])
        for row in prepare_data(config(path), tokenizer).train:
            assert row["labels"][-1] == row["input_ids"][-1] == tokenizer.eos_token_id

    def test_text_without_an_end_token_is_warned_about(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        tokenizer.eos_token = None
        data = prepare_data(config(write_rows("a.jsonl", [{"text": words(3)}])), tokenizer)
        assert len(data.train[0]["input_ids"]) == 3
        assert "no end token" in data.report.warnings[0]

    @pytest.mark.parametrize(
        ("options", "keys"),
        [
            ({"supervise": "assistant"}, ["supervise"]),
            ({"supervise": "last"}, ["supervise"]),
            ({"supervise": "completion"}, ["supervise"]),
        ],
    )
    def test_what_would_not_be_done_is_refused(
        self, options: dict[str, Any], keys: list[str], tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        found = refused(config(write_rows("a.jsonl", [{"text": "x"}]), **options), tokenizer)
        assert [problem.key for problem in found] == [f"data.{key}" for key in keys]

    def test_no_data(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert refused(TrainingConfig(), tokenizer)[0].key == "data.train"

    def test_a_limit_of_one_token(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        assert refused(config(write_rows("a.jsonl", [{"text": "x"}]), limit=1), tokenizer)[0].expected == "at least 2"


class TestEvaluation:
    """An evaluation that was asked for has rows, or there is no run."""

    def test_held_out_rows_are_a_fixed_random_share(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        path = write_rows("a.jsonl", [{"text": str(n)} for n in range(100)])

        def split(seed: int) -> Data:
            return prepare_data(config(path, eval_fraction=0.1, training={"seed": seed}), tokenizer)

        first, again, other = split(1), split(1), split(2)
        assert first.eval is not None
        assert again.eval is not None
        assert other.eval is not None
        assert (len(first.train), len(first.eval)) == (90, 10)
        assert first.eval.tokens.tolist() == again.eval.tokens.tolist()
        assert first.eval.tokens.tolist() != other.eval.tokens.tolist()
        kept = {str(row) for row in first.train}
        assert len(kept) == 90
        assert not kept & {str(row) for row in first.eval}

    def test_own_eval_data_leaves_the_training_rows_alone(
        self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
    ) -> None:
        train, held_out = (write_rows(name, [{"text": "x y z"}] * 4) for name in ("a.jsonl", "b.jsonl"))
        data = prepare_data(config(train, eval=[{"path": held_out}]), tokenizer)
        assert data.eval is not None
        assert (len(data.train), len(data.eval)) == (4, 4)
        assert data.report.eval is not None
        assert data.report.eval.name == "eval"

    def test_eval_asked_for_without_data(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x"}])
        (problem,) = refused(config(path, training={"eval_steps": 10}), tokenizer)
        assert problem.key == "training.eval_steps"
        assert "data.eval_fraction" in str(problem.expected)

    def test_eval_empty_after_filtering(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        train = write_rows("a.jsonl", [chat(1, 1)])
        held_out = write_rows("b.jsonl", [chat(100, 1)] * 3)
        (problem,) = refused(config(train, eval=[{"path": held_out}]), tokenizer)
        assert problem.key == "data.eval"
        assert "nothing is left to evaluate on; 3 rows read, 3 dropped" in problem.message

    def test_fraction_of_too_few_rows(self, tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x y"}])
        assert refused(config(path, eval_fraction=0.5), tokenizer)[0].key == "data.eval_fraction"

    def test_problems_of_both_are_reported_at_once(self, tokenizer: PreTrainedTokenizerFast) -> None:
        found = refused(config("./a.jsonl", eval=[{"path": "./b.jsonl"}]), tokenizer)
        assert [problem.key for problem in found] == ["data.train[0]", "data.eval[0]"]


class TestTrainingTexts:
    def test_held_out_rows_are_not_in_them(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        path = write_rows("a.jsonl", [{"text": str(n)} for n in range(50)])
        some = config(path, eval_fraction=0.2)
        texts = list(training_texts(some))
        assert len(texts) == 40
        assert texts == list(training_texts(some)) != sorted(texts, key=int)
        held_out = prepare_data(some, tokenizer).eval
        assert held_out is not None
        seen = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in held_out}
        assert not seen & set(texts)

    def test_chats_give_their_messages(self, write_rows: WriteRows) -> None:
        assert sorted(training_texts(config(write_rows("a.jsonl", [chat(1, 2)])))) == ["<a>", "<b><b>"]


def test_the_same_config_gives_the_same_rows(tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
    path = write_rows("a.jsonl", [chat(n, 20 - n) for n in range(1, 20)])
    first, second = (prepare_data(config(path), tokenizer) for _ in range(2))
    assert first.train.tokens.tolist() == second.train.tokens.tolist()
    assert first.train.labels.tolist() == second.train.labels.tolist()
    assert first.report == second.report
    assert first.report.to_json()["train"]["kept"] == 19

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from framework.build.data.batches import MicroBatch
from framework.build.data.prepare import Data, prepare_data, training_texts
from framework.build.data.report import Account
from framework.build.data.stream import Position
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.sources.python_rows import NO_ROWS, RowsFromPython, take_rows
from framework.build.text.named_templates import read_template
from framework.errors import Problem, RequestError
from framework.schema.config import Batch, TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.grids import slow

STEP = Batch(3, 2, 1)
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(read_template("chatml"), ("<|im_start|>", "<|im_end|>"))


@pytest.fixture
def path(write_rows: WriteRows) -> str:
    return write_rows("a.jsonl", [{"text": f"row {number}"} for number in range(100)])


def config(*paths: str, limit: int = 32, **data: Any) -> TrainingConfig:
    training = {"max_steps": 10, "seed": 3, **data.pop("training", {})}
    train = [source if isinstance(source, dict) else {"path": source} for source in paths]
    document = {"streaming": True, "shuffle_buffer": 16, "train": train, **data}
    return TrainingConfig.model_validate({"training": training, "model": {"model_max_length": limit}, "data": document})


def prepared(config: TrainingConfig, tokenizer: PreTrainedTokenizerFast, given: RowsFromPython = NO_ROWS) -> Data:
    return prepare_data(config, tokenizer, given=given)


def batches(data: Data, batch: Batch = STEP, **options: Any) -> StreamedBatches:
    assert data.stream is not None
    return StreamedBatches(data.stream, batch, pad_token_id=0, **options)


def texts(data: Data, tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    assert data.stream is not None
    rows = islice(data.stream.rows(Position()), count)
    return [tokenizer.decode(each.row["input_ids"], skip_special_tokens=True) for each in rows]


def equal(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    same = [micro.keys() for micro in one] == [micro.keys() for micro in other]
    return same and all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


def refused(some: TrainingConfig, tokenizer: PreTrainedTokenizerFast, steps: int = 30) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        list(islice(batches(prepared(some, tokenizer)).start(0), steps))
    return caught.value.problems


ROWS_OF = {
    "tokens": [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": []}, {"input_ids": [8, 9]}],
    "text": [{"text": "one"}, {"text": ""}, {"text": "two"}],
    "messages": [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    ],
    "alpaca": [
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": ""},
        {"instruction": "c", "output": "d"},
    ],
    "prompt_completion": [
        {"prompt": "a ", "completion": "b"},
        {"prompt": "a ", "completion": ""},
        {"prompt": "c ", "completion": "d"},
    ],
}
"""Format -> rows, the second of which holds nothing."""


@pytest.mark.parametrize("row_format", ROWS_OF)
def test_rows_of_any_form_are_streamed_as_they_are_held(
    row_format: str, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows("a.jsonl", ROWS_OF[row_format])
    streamed = prepared(config(path, shuffle_buffer=1), tokenizer)
    held = prepared(config(path, streaming=False), tokenizer)
    assert streamed.stream is not None
    found = [each.row for each in islice(streamed.stream.rows(Position()), 2)]
    assert held.train is not None
    assert found == list(held.train)
    assert len(found) == 2


class TestOrder:
    def test_each_epoch_has_every_row_once_in_its_own_order(
        self, path: str, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        seen = texts(prepared(config(path), tokenizer), tokenizer, 300)
        epochs = [seen[start : start + 100] for start in (0, 100, 200)]
        assert all(sorted(epoch) == sorted(f"row {number}" for number in range(100)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert sorted(epochs[0][:16], key=lambda text: int(text[4:])) == [f"row {number}" for number in range(16)]

    def test_the_seed_decides(self, path: str, tokenizer: PreTrainedTokenizerFast) -> None:
        first, again, other = (
            texts(prepared(config(path, training={"seed": seed}), tokenizer), tokenizer, 50) for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_a_buffer_of_one_row_keeps_the_order(self, path: str, tokenizer: PreTrainedTokenizerFast) -> None:
        seen = texts(prepared(config(path, shuffle_buffer=1), tokenizer), tokenizer, 105)
        assert seen == [f"row {number % 100}" for number in range(105)]

    def test_a_mixture_draws_as_interleave_datasets_does(
        self, path: str, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        import datasets

        other = write_rows("b.jsonl", [{"text": f"other {number}"} for number in range(30)])
        for rule in ("first_exhausted", "all_exhausted"):
            sources = [{"path": path, "weight": 1}, {"path": other, "weight": 3}]
            some = config(*sources, mixing=rule, shuffle_buffer=1)
            parts = [datasets.load_dataset("json", data_files=each, split="train") for each in (path, other)]
            mixed = datasets.interleave_datasets(parts, [0.25, 0.75], seed=[3, 0], stopping_strategy=rule)
            expected = [text.strip() for text in mixed["text"]]
            data = prepared(some, tokenizer)
            assert texts(data, tokenizer, len(expected)) == expected
            assert data.stream is not None
            epochs = [each.after.epoch for each in islice(data.stream.rows(Position()), len(expected) + 1)]
            assert epochs[-2:] == [0, 1]
            assert "sampled from 25.0%" in str(data.report)

    @pytest.mark.parametrize("rule", ["first_exhausted", "all_exhausted"])
    def test_a_source_of_a_mixture_of_which_no_row_is_kept_is_named(
        self, rule: str, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        empty = write_rows("b.jsonl", [{"text": ""} for _ in range(30)])
        many = write_rows("c.jsonl", [{"text": f"row {number}"} for number in range(500)])
        some = config({"path": many, "weight": 1}, {"path": empty, "weight": 1}, mixing=rule)
        (problem,) = refused(some, tokenizer, steps=200)
        assert (problem.key, problem.message) == (
            "data.train[1]",
            f"no row of {empty} is left to sample for the mixture",
        )
        held = some.model_copy(update={"data": some.data.model_copy(update={"streaming": False})})
        with pytest.raises(RequestError) as caught:
            prepared(held, tokenizer)
        assert caught.value.problems == (problem,), "as the same rows are that are held in memory"


class TestResuming:
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("packing", [False, True])
    def test_any_step_resumes_bitwise(
        self, workers: int, packing: bool, path: str, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        data = prepared(config(path, packing=packing), tokenizer)
        straight = batches(data)
        taken, positions = [], []
        for step, made in enumerate(islice(straight.start(0), 40)):
            positions.append(straight.position(step).to_json())
            taken.append(made)
        assert positions[-1]["epoch"] > 0
        for step in (0, 7, 31) if not workers else (31,):
            fresh = batches(data, workers=workers)
            fresh.go_on(step, positions[step])
            assert all(equal(*pair) for pair in zip(islice(fresh.start(step), 40 - step), taken[step:], strict=True))

    def test_without_a_position_rows_are_counted_from_the_start(
        self, path: str, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        data = prepared(config(path), tokenizer)
        straight = list(islice(batches(data).start(0), 25))
        assert equal(next(batches(data).start(24)), straight[24])

    def test_another_split_of_the_step_has_the_same_rows(self, path: str, tokenizer: PreTrainedTokenizerFast) -> None:
        some = batches(prepared(config(path), tokenizer))
        steps = some.start(0)
        for _ in range(5):
            next(steps)
        places = some.rows_of(4)
        shrunk = replace(some, batch=Batch(1, 6, 1))
        again = next(shrunk.start(4))
        assert len(again) == 6
        assert shrunk.rows_of(4) == places
        assert len(places) == 6
        assert places[0].startswith(path)

    def test_rows_before_a_position_are_not_tokenised(
        self, path: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from framework.build.data import stream

        data = prepared(config(path), tokenizer)
        encode, counted = stream.encode_batch, []
        monkeypatch.setattr(
            stream, "encode_batch", lambda batch, how: counted.append(len(batch["form"])) or encode(batch, how)
        )
        assert data.stream is not None
        next(data.stream.rows(Position(0, 5, 3)))
        assert sum(counted) == 16

    def test_ranks_share_a_step(self, path: str, tokenizer: PreTrainedTokenizerFast) -> None:
        data = prepared(config(path), tokenizer)
        alone = batches(data, Batch(4, 1, 1))
        ranks = [batches(data, Batch(2, 1, 2), rank=rank) for rank in range(2)]
        for step, _ in enumerate(islice(zip(alone.start(0), *(rank.start(0) for rank in ranks), strict=True), 30)):
            assert [*ranks[0].rows_of(step), *ranks[1].rows_of(step)] == alone.rows_of(step)


class TestPolicies:
    """Properties of rows in memory also hold for a stream."""

    def test_one_long_row_never_reaches_a_batch(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        rows = [{"text": f"row {number}"} for number in range(99)]
        path = write_rows("a.jsonl", [*rows[:50], {"text": "word " * 320}, *rows[50:]])
        for options, kept in ({}, 100), ({"truncation": "drop"}, 99), ({"training": {"task": "pretrain"}}, None):
            some = batches(prepared(config(path, **options), tokenizer))
            steps = list(islice(some.start(0), 40))
            assert max(micro["input_ids"].shape[1] for step in steps for micro in step) <= 32
            report = some.progress.account.report
            assert report is not None
            if kept is not None:
                assert report.kept == pytest.approx(kept * report.read / 100, abs=2)
            assert report.lengths["1.0"] > 320
        (problem,) = refused(config(path, truncation="error"), tokenizer)
        assert problem.where == f"{path}:51"

    def test_the_account_is_that_of_rows_held_whole(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        rows = [{"text": "word " * (number % 9)} for number in range(128)]
        path = write_rows("a.jsonl", rows)
        whole = prepare_data(config(path, streaming=False), tokenizer).report.train
        data, account = prepared(config(path), tokenizer), Account()
        assert data.stream is not None
        for block in data.stream.blocks(0):
            account.add(block.report, block.lengths)
        assert account.report is not None
        assert replace(account.report, stream=None) == whole
        assert "train (a stream, so far): 128 rows read" in str(account.report)

    def test_packs_hold_rows_of_one_block(self, path: str, tokenizer: PreTrainedTokenizerFast) -> None:
        data = prepared(config(path, packing=True), tokenizer)
        assert data.stream is not None
        blocks = list(data.stream.blocks(0))
        assert [len(block.places) for block in blocks] == [16] * 6 + [4]
        assert all(block.rows.lengths.max() <= 32 for block in blocks)
        held = Counter(str(place) for block in blocks for index in block.order for place in block.places_of(index))
        assert held == Counter(f"{path}:{number}" for number in range(1, 101))
        micro = next(batches(data).start(0))[0]
        assert "position_ids" in micro

    def test_chats(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]
        path = write_rows("a.jsonl", [{"messages": chat}] * 20)
        whole = prepare_data(config(path, streaming=False), tokenizer).train[0]
        (micro, *_) = next(batches(prepared(config(path), tokenizer)).start(0))
        assert micro["labels"][0].tolist() == whole["labels"]

    def test_rows_from_python(self, tokenizer: PreTrainedTokenizerFast) -> None:
        some, given = take_rows(config(), RowsFromPython(lambda: ({"text": f"row {number}"} for number in range(40))))
        data = prepared(some, tokenizer, given)
        assert Counter(texts(data, tokenizer, 80)) == Counter({f"row {number}": 2 for number in range(40)})
        assert len(list(training_texts(some, given))) == 40


class TestRefusals:
    def test_a_broken_row_is_reported_when_its_block_is_read(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        path = write_rows("a.jsonl", [{"text": f"row {number}"} for number in range(320)])
        with open(path, "a") as file:
            file.write('{"text": 5}\n')
        for workers in (0, 1):
            steps = batches(prepared(config(path), tokenizer), workers=workers).start(0)
            assert len(list(islice(steps, 52))) == 52
            with pytest.raises(RequestError) as caught:
                list(islice(steps, 10))
            (problem,) = caught.value.problems
            assert (problem.where, problem.message) == (f"{path}:321", "column `text`: expected text, not int 5")

    def test_first_rows_of_which_none_is_left(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        (problem,) = refused(config(write_rows("a.jsonl", [{"text": ""}] * 40)), tokenizer)
        assert "16 rows read, 16 dropped (16 empty), 0 kept" in problem.message

    def test_a_json_array(self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        (tmp_path / "a.json").write_text('[{"text": "x"}]')
        (problem,) = refused(config(str(tmp_path / "a.json")), tokenizer)
        assert "write one object per line" in problem.message
        (tmp_path / "a.json").write_text('{"text": "x"}\n{"text": "y"}\n')
        assert prepared(config(str(tmp_path / "a.json")), tokenizer).stream is not None

    @pytest.mark.parametrize(
        ("options", "key"),
        [
            ({"training": {"max_steps": None}}, "training.max_steps"),
            ({"eval_fraction": 0.1}, "data.eval_fraction"),
            ({"group_by_length": True}, "data.group_by_length"),
            ({"workers": 2}, "data.workers"),
            ({"training": {"task": "classification"}}, "data.labels"),
        ],
    )
    def test_what_a_stream_cannot_do(self, options: dict[str, Any], key: str) -> None:
        found = find_conflicts(config("a.jsonl", **options), Needs())
        assert [each.keys[1] for each in found if each.keys[0] == "data.streaming"] == [key]

    def test_a_buffer_without_a_stream_is_pointed_out(self) -> None:
        found = find_conflicts(config("a.jsonl", streaming=False), Needs())
        assert [each.keys[0] for each in found if each.keys[0].startswith("data")] == ["data.shuffle_buffer"]


class TestHub:
    """A dataset of the hub as `load_dataset(streaming=True)` gives it."""

    @pytest.fixture(autouse=True)
    def _hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def load_dataset(path: str, name: str | None, split: str, streaming: bool) -> datasets.IterableDataset:
            assert (path, name, split, streaming) == ("acme/texts", None, "train", True)
            rows = [{"text": f"row {number}", "image": number} for number in range(40)]
            return datasets.IterableDataset.from_generator(lambda: iter(rows))

        monkeypatch.setattr("framework.build.sources.sources.hub_is_reachable", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def test_rows_and_slices(self, tokenizer: PreTrainedTokenizerFast) -> None:
        some = config({"path": "acme/texts", "split": "train[10:30]"})
        seen = texts(prepared(some, tokenizer), tokenizer, 40)
        assert Counter(seen) == Counter({f"row {number}": 2 for number in range(10, 30)})

    def test_a_share_would_load_everything(self, tokenizer: PreTrainedTokenizerFast) -> None:
        (problem,) = refused(config({"path": "acme/texts", "split": "train[10%:]"}), tokenizer)
        assert problem.key == "data.train[0].split"
        assert problem.expected == "row numbers, as in `train[:1000]`"


def test_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """10 MB of JSONL, most of it in a column that is not read; holding it would take more than twice that."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"text": f"row {n}", "other": "x" * 5000}) + "\n" for n in range(2000))
    data = prepared(config(str(path), shuffle_buffer=200), tokenizer)
    assert data.stream is not None
    blocks = data.stream.blocks(0)
    next(blocks)
    held = next(blocks)
    tracemalloc.start()  # resident memory also has what malloc keeps of earlier tests
    try:
        for block in blocks:
            held = block
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(held.places[-1]) == f"{path}:2000"
    assert most < 8_000_000


class TestAccount:
    """1,500 rows that are kept and then 3,000 whose prompts are too long: what a stream says of them."""

    @pytest.fixture
    def rows(self, write_rows: WriteRows) -> str:
        short, long = {"prompt": "a ", "completion": "b"}, {"prompt": "word " * 36, "completion": "b"}
        return write_rows("pairs.jsonl", [short] * 1500 + [long] * 3000)

    @pytest.mark.slow
    @pytest.mark.parametrize(("buffer", "workers"), [(1000, 0), slow(1000, 1), slow(16, 0)])
    def test_blocks_of_which_nothing_is_kept_are_counted(
        self, buffer: int, workers: int, rows: str, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        data = prepared(config(rows, shuffle_buffer=buffer, truncation="drop"), tokenizer)
        some = batches(data, Batch(4, 1, 1), workers=workers)
        reports, steps = dict[int, str](), some.start(0)
        for step in range(380):
            next(steps)
            for news in some.progress.account.news():
                reports[step] = news
        report = some.progress.account.report
        assert report is not None
        assert (report.read, report.kept, report.dropped) == (4500, 1500, {"longer than 32 tokens": 3000})
        assert report.supervised_lost_share == pytest.approx(2 / 3)
        assert "dropped 3,000 rows (66.7 %)" in str(report)
        assert str(report).startswith("train (a stream, one epoch): 4,500 rows read, 1,500 rows")
        assert [*reports] == ([250, 375] if buffer == 1000 else [375])
        assert all("of the supervised tokens of train are lost" in news for news in reports.values())
        most = reports[375]
        assert most.startswith("data.train: 66.7% of the supervised tokens of train are lost to the limit of 32 tokens")
        assert most.endswith("without streaming this is an error")
        held = config(rows, streaming=False, truncation="drop")
        with pytest.raises(RequestError, match=r"66\.7% of the supervised tokens"):
            prepared(held, tokenizer)

    @pytest.mark.slow
    @pytest.mark.parametrize("stops", [(130, 378), slow((0,))])
    def test_a_run_that_is_resumed_has_the_account_of_the_whole(
        self, stops: tuple[int, ...], rows: str, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        data = prepared(config(rows, truncation="drop", shuffle_buffer=100), tokenizer)
        straight = batches(data, Batch(4, 1, 1))
        states = {}
        for step, _ in enumerate(islice(straight.start(0), 380)):
            if step in stops:
                states[step] = json.loads(json.dumps(straight.state_at(step)))
        for step in states:
            fresh = batches(data, Batch(4, 1, 1))
            fresh.go_on(step, states[step])
            for _ in islice(fresh.start(step), 380 - step):
                pass
            assert fresh.progress.account.report == straight.progress.account.report

    def test_columns_and_remarks_of_later_blocks_are_reported(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        empty = [chat[0], {"role": "assistant", "content": ""}]
        path = write_rows("a.jsonl", [{"messages": chat}] * 32 + [{"messages": empty, "id": 1}] * 32)
        some = batches(prepared(config(path), tokenizer), Batch(4, 1, 1))
        for _ in islice(some.start(0), 20):
            pass
        report = some.progress.account.report
        assert report is not None
        assert report.unread == {path: ["`id`"]}
        assert [*report.remarks.values()] == [32]
        assert some.progress.account.news()[0].startswith(
            "data.train: 32 of 64 rows of train (50.0 %) have an empty answer"
        )

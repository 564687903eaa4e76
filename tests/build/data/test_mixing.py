from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.batches import GlobalBatches
from framework.build.data.mixing import mixture
from framework.build.data.packing import Packs
from framework.build.data.prepare import Data, prepare_data
from framework.errors import RequestError
from framework.schema.choices import Mixing
from framework.schema.config import Batch, TrainingConfig
from framework.schema.data import DatasetParams
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.every import Needs, find_conflicts
from tests.build.data.test_batches import make_rows

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]


def sources(*weights: float) -> list[DatasetParams]:
    return [DatasetParams(path=f"{index}.jsonl", weight=weight) for index, weight in enumerate(weights)]


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def two(write_rows: WriteRows) -> list[str]:
    """10 rows of A, 40 of B."""
    return [
        write_rows(f"{name}.jsonl", [{"text": f"{name} {row}"} for row in range(n)])
        for name, n in (("A", 10), ("B", 40))
    ]


def config(paths: list[str], weights: tuple[float, ...] = (3, 1), **data: Any) -> TrainingConfig:
    train = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    training = data.pop("training", {"seed": 5})
    document = {"train": train, "mixing": "all_exhausted", **data}
    return TrainingConfig.model_validate({"training": training, "model": {"model_max_length": 64}, "data": document})


def texts(data: Data, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in data.train]


@pytest.mark.parametrize("rule", [Mixing.FIRST_EXHAUSTED, Mixing.ALL_EXHAUSTED])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 9)])
def test_draws_are_those_of_interleave_datasets(rule: Mixing, weights: tuple[float, float]) -> None:
    parts = [datasets.Dataset.from_dict({"n": range(50)}), datasets.Dataset.from_dict({"n": range(50, 250)})]
    shares = [weight / sum(weights) for weight in weights]
    expected = datasets.interleave_datasets(parts, shares, seed=3, stopping_strategy=str(rule))["n"]
    assert mixture(sources(*weights), [50, 200], rule, seed=3).tolist() == list(expected)


def test_the_rules_stop_where_they_say() -> None:
    first = Counter(mixture(sources(1, 1), [50, 5000], Mixing.FIRST_EXHAUSTED, 0).tolist())
    assert max(first.values()) == 1
    assert set(range(50)) <= set(first)
    every = Counter(mixture(sources(1, 1), [50, 5000], Mixing.ALL_EXHAUSTED, 0).tolist())
    assert set(every) == set(range(5050))
    assert max(every[row] for row in range(50, 5050)) == 1
    assert every[0] == pytest.approx(100, rel=0.1)


def test_the_seed_decides() -> None:
    first, again, other = (mixture(sources(1, 2), [9, 9], Mixing.ALL_EXHAUSTED, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_rows_of_an_epoch_and_the_account_of_them(tokenizer: PreTrainedTokenizerFast, two: list[str]) -> None:
    data = prepare_data(config(two), tokenizer)
    found = Counter(text[0] for text in texts(data, tokenizer))
    assert set(texts(data, tokenizer)) == {f"A {row}" for row in range(10)} | {f"B {row}" for row in range(40)}
    assert found["A"] / found["B"] == pytest.approx(3, rel=0.3)
    first, second = data.report.train.mixture
    assert (first.path, first.kept, first.drawn, first.weight) == (two[0], 10, found["A"], 0.75)
    assert (second.kept, second.drawn) == (40, found["B"])
    message = str(data.report)
    assert f"mixed by weight, all_exhausted: {len(data.train)} rows an epoch" in message
    assert f"75.0% {two[0]}: an epoch draws {found['A']} rows of 10" in message


def test_the_run_as_a_whole_is_reported(tokenizer: PreTrainedTokenizerFast, two: list[str]) -> None:
    training = {"max_steps": 100, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    data = prepare_data(config(two, training=training), tokenizer)
    seen = sum(each.drawn * each.epochs for each in data.report.train.mixture)
    assert seen == pytest.approx(600)
    again = prepare_data(config(two, training={"num_train_epochs": 2.5}), tokenizer)
    assert {each.epochs for each in again.report.train.mixture} == {2.5}


def test_held_out_rows_are_in_no_draw(tokenizer: PreTrainedTokenizerFast, two: list[str]) -> None:
    data = prepare_data(config(two, eval_fraction=0.2), tokenizer)
    assert data.eval is not None
    held_out = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in data.eval}
    assert len(held_out) == len(data.eval) == 10
    assert not held_out & set(texts(data, tokenizer))
    assert sum(each.kept for each in data.report.train.mixture) == 40


def test_mixed_rows_are_packed(tokenizer: PreTrainedTokenizerFast, two: list[str]) -> None:
    plain, packed = (prepare_data(config(two, packing=packing), tokenizer) for packing in (False, True))
    assert isinstance(packed.train, Packs)
    tokens = sorted(token for row in plain.train for token in row["input_ids"])
    assert sorted(token for row in packed.train for token in row["input_ids"]) == tokens
    assert packed.report.train.packed_tokens == len(tokens)


def test_an_epoch_of_batches_has_every_draw_once(tokenizer: PreTrainedTokenizerFast, two: list[str]) -> None:
    data = prepare_data(config(two), tokenizer)
    batches = GlobalBatches(data.train, Batch(4, 1, 1), seed=1, pad_token_id=0, by_length=True)
    steps = batches.start(0)
    drawn = [micro for _ in range(batches.steps_per_epoch) for micro in next(steps)]
    assert sum(len(micro["input_ids"]) for micro in drawn) == len(data.train)
    assert data.train.lengths.tolist() == [len(row["input_ids"]) for row in data.train]


def test_a_source_of_which_nothing_is_left(tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
    paths = [write_rows("a.jsonl", [{"text": "x y"}]), write_rows("b.jsonl", [{"text": ""}])]
    with pytest.raises(RequestError) as caught:
        prepare_data(config(paths), tokenizer)
    assert [problem.key for problem in caught.value.problems] == ["data.train[1]"]


@pytest.mark.parametrize(
    ("data", "keys", "expected"),
    [
        ({"train": [{"path": "a", "weight": 1}, {"path": "b"}]}, ["data.train[0].weight"], "first_exhausted or"),
        (
            {"mixing": "first_exhausted", "train": [{"path": "a", "weight": 1}, {"path": "b"}]},
            ["data.mixing"],
            "a weight",
        ),
        ({"mixing": "first_exhausted", "train": [{"path": "a"}, {"path": "b"}]}, ["data.mixing"], "a weight"),
        ({"mixing": "all_exhausted", "train": [{"path": "a", "weight": 1}]}, ["data.mixing"], "concatenate"),
        ({"train": [{"path": "a"}], "eval": [{"path": "b", "weight": 1}]}, ["data.eval[0].weight"], "no weight"),
    ],
)
def test_weights_and_rule_need_each_other(data: dict[str, Any], keys: list[str], expected: str) -> None:
    assert [each.keys[0] for each in conflicts(data)] == keys
    assert expected in str(conflicts(data)[0].expected)


def test_weights_with_a_rule_are_fine() -> None:
    assert not conflicts(
        {"mixing": "first_exhausted", "train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]}
    )


def conflicts(data: dict[str, Any]) -> list[Conflict]:
    found = find_conflicts(TrainingConfig.model_validate({"data": data}), Needs())
    return [each for each in found if each.keys[0].startswith("data")]


def test_rows_chosen_several_times_are_held_once() -> None:
    rows = make_rows(5)
    chosen = replace(rows, order=np.array([4, 0, 0]))
    assert [row["input_ids"][0] for row in chosen] == [104, 100, 100]
    assert chosen.lengths.tolist() == [5, 1, 1]
    assert chosen.tokens is rows.tokens

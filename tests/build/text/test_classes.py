"""The meaning of labels, and refused ones."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import prepare_data
from framework.build.text.classes import WrongLabel, coarse_values, find_classes, find_values
from framework.errors import RequestError
from framework.schema.config import TrainingConfig


def texts(labels: Sequence[object]) -> list[str]:
    return [json.dumps(label) for label in labels]


def test_numbers_of_one_size_have_an_order_that_is_not_the_sets() -> None:
    assert find_classes(texts(["10", "1", "001", "2", "01"]), None).names == ("001", "01", "1", "2", "10")
    longest = "9" * 5000
    assert find_classes(texts([longest, "\u0663", "10", "2"]), None).names == ("2", "\u0663", "10", longest)


def test_a_number_is_the_index_of_a_class_unless_classes_are_numbers() -> None:
    named = find_classes([], ["no", "yes"])
    assert [int(named.of(label)[0]) for label in ("yes", 0, 1, 1.0)] == [1, 0, 1, 1]
    numbered = find_classes(texts([1, 2, 3]), None)
    assert [int(numbered.of(label)[0]) for label in (1, 2.0, "3")] == [0, 1, 2]
    with pytest.raises(WrongLabel, match=r"'0' is not one of the classes \(1, 2, 3\)"):
        numbered.of(0)


@pytest.mark.parametrize("labels", [[0.5, 1.5], [[], []], [-1, -2]])
def test_labels_without_a_class_are_refused(labels: Sequence[object]) -> None:
    with pytest.raises(WrongLabel, match="no row has a class: the first label is"):
        find_classes(texts(labels), None)
    assert find_classes([None, None], None).names == ()


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, "1e999", "nan", "many", None])
def test_what_float32_cannot_hold_is_no_value(value: object) -> None:
    with pytest.raises(WrongLabel, match="expected a finite number"):
        find_values(texts([1.5])).of(value)


def test_an_empty_list_is_no_value_and_does_not_say_how_many_there_are() -> None:
    found = find_values(texts([[], [1, 2]]))
    assert found.size == 2
    with pytest.raises(WrongLabel, match="the list is empty"):
        found.of([])
    with pytest.raises(WrongLabel, match="the list is empty"):
        find_values(texts([[]])).of([])


@pytest.fixture
def refused(
    write_rows: Callable[..., str], make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> Callable[..., str]:
    def refused(task: str, labels: Sequence[object]) -> str:
        rows = [{"text": f"row {number}", "label": label} for number, label in enumerate(labels)]
        document: dict[str, Any] = {"training": {"task": task}, "model": {"model_max_length": 32}}
        document["data"] = {"train": [{"path": write_rows("a.jsonl", rows)}]}
        with pytest.raises(RequestError) as caught:
            prepare_data(TrainingConfig.model_validate(document), make_tokenizer())
        return str(caught.value)

    return refused


def test_labels_of_no_kind_are_the_users_mistake(refused: Callable[..., str]) -> None:
    assert "values are for training.task=regression" in refused("classification", [0.5, 1.5])
    assert "the list is empty" in refused("regression", [[]])
    assert "a.jsonl:2" in refused("regression", [1.0, 10**400])


def test_an_empty_field_of_a_table_is_no_label(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\none,a\ntwo,\nthree,b\nfour, \n")
    document: dict[str, Any] = {"training": {"task": "classification"}, "model": {"model_max_length": 32}}
    document["data"] = {"train": [{"path": str(path)}]}
    data = prepare_data(TrainingConfig.model_validate(document), make_tokenizer())
    assert data.targets is not None
    assert data.targets.names == ("a", "b")
    assert (data.report.train.kept, data.report.train.dropped) == (2, {"empty": 2})
    assert data.report.warnings == (
        "data.train: 50% of the rows of train are left out: a required column is absent or empty",
    )


def test_a_table_may_say_by_how_much_an_answer_is_better(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected,margin\nq ,yes,no,0.5\nq ,yes,no,\n")
    document: dict[str, Any] = {"training": {"task": "reward"}, "model": {"model_max_length": 32}}
    document["data"] = {"train": [{"path": str(path)}]}
    rows = prepare_data(TrainingConfig.model_validate(document), make_tokenizer()).train
    assert [row["target"] for row in rows] == [[0.5], [0.0]]
    path.write_text("prompt,chosen,rejected,margin\nq ,yes,no,much\n")
    with pytest.raises(RequestError, match=r"column `margin`: is str 'much': expected a number"):
        prepare_data(TrainingConfig.model_validate(document), make_tokenizer())


def test_values_that_float32_makes_one_of_are_reported_with_how_to_scale() -> None:
    (messages,) = coarse_values(texts([2e9 + step for step in range(200)]))
    assert (
        "the 200 different values from 2000000000 to 2000000199 are 3 in float32, whose steps are 128 there" in messages
    )
    assert "subtract 2000000100 from them" in messages
    assert "divide by 57.7" in messages
    (messages,) = coarse_values(texts([[0.1 * step, str(2e9 + step)] for step in range(200)]))
    assert "are 3 in float32" in messages


def test_values_that_float32_holds_well_enough_are_not_reported() -> None:
    generator = np.random.default_rng(0)
    assert coarse_values(texts(generator.random(20_000).tolist())) == []
    assert coarse_values(texts([2e9] * 5 + [4e9])) == []
    assert coarse_values(texts(["far", None, []])) == []
    assert coarse_values([]) == []


def test_the_warning_reaches_the_reader_of_the_rows(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    rows = [{"text": f"the fox {step}", "label": 2e9 + step} for step in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "training": {"task": "regression", "max_steps": 1},
        "model": {"model_max_length": 16},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}]},
    }
    (warnings,) = prepare_data(TrainingConfig.model_validate(tree), make_tokenizer()).report.warnings
    assert warnings.startswith("column `label`: the 40 different values")

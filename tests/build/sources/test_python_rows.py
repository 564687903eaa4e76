from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data.prepare import prepare_data, training_texts
from framework.build.sources.python_rows import RowsFromPython, digest, take_rows
from framework.errors import RequestError
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
ROWS = [{"text": f"row {number}"} for number in range(20)]


def config(**data: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"model": {"model_max_length": 64}, "data": data})


def decoded(tokenizer: PreTrainedTokenizerFast, rows: Any) -> list[str]:
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def generated() -> Iterator[dict[str, str]]:
    yield from ROWS


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), generated, generated(), iter(ROWS)])
def test_lists_iterators_and_functions_are_rows(rows: Any, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    taken, given = take_rows(config(), RowsFromPython(train=rows, eval=ROWS[:3]))
    assert [source.path for source in (*taken.data.train, *taken.data.eval)] == ["python_rows", "python_rows"]
    assert taken.data.train[0].digest == digest(ROWS)
    data = prepare_data(taken, tokenizer, given=given)
    assert decoded(tokenizer, data.train) == [row["text"] for row in ROWS]
    assert data.eval is not None
    assert len(data.eval) == 3
    assert len(list(training_texts(taken, given))) == 20


def test_they_stand_where_the_config_says(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    source = {"path": "python_rows", "columns": {"text": "body"}, "split": "train[:1]"}
    (tmp_path / "a.txt").write_text("from a file\n")
    some = config(train=[{"path": str(tmp_path / "a.txt")}, source])
    taken, given = take_rows(some, RowsFromPython([{"body": "x y"}, {"body": "z"}]))
    tokenizer = make_tokenizer()
    assert decoded(tokenizer, prepare_data(taken, tokenizer, given=given).train) == ["from a file", "x y"]


def test_a_wrong_row_is_named(make_tokenizer: MakeTokenizer) -> None:
    taken, given = take_rows(config(), RowsFromPython([{"text": "x"}, {"text": 5}, "z"]))  # type: ignore[list-item]
    with pytest.raises(RequestError) as caught:
        prepare_data(taken, make_tokenizer(), given=given)
    first, second = caught.value.problems
    assert (first.where, first.message) == ("python_rows:2", "column `text`: expected text, not int 5")
    assert (second.where, second.message) == ("python_rows:3", "expected a mapping of columns, not str")


def test_a_recorded_run_asks_for_its_rows(make_tokenizer: MakeTokenizer) -> None:
    taken, _ = take_rows(config(), RowsFromPython(ROWS))
    with pytest.raises(RequestError) as caught:
        prepare_data(taken, make_tokenizer())
    assert caught.value.problems[0].expected == "framework.train(config, train_rows=...)"
    assert take_rows(taken, RowsFromPython(generated))[0] == taken
    with pytest.raises(RequestError) as caught:
        take_rows(taken, RowsFromPython(ROWS[1:]))
    (problem,) = caught.value.problems
    assert (problem.key, problem.expected) == ("data.train[0].digest", digest(ROWS))


def test_rows_without_a_place_are_refused() -> None:
    with pytest.raises(RequestError, match="rows are given from Python, and no source"):
        take_rows(config(train=[{"path": "python_stdlib"}]), RowsFromPython(ROWS))


def test_a_stream_needs_rows_that_can_be_read_again() -> None:
    some = config(streaming=True)
    assert take_rows(some, RowsFromPython(generated))[0].data.train[0].digest is None
    with pytest.raises(RequestError, match="the function that makes the iterator"):
        take_rows(some, RowsFromPython(generated()))


def test_a_digest_of_a_file_is_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(RequestError, match="is only for rows from Python"):
        prepare_data(config(train=[{"path": "python_stdlib", "digest": "x"}]), make_tokenizer())

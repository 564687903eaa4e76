import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from framework.build.data import prepare as data_module
from framework.build.data import row_cache
from framework.build.data.packing import Packs
from framework.build.data.prepare import Data, prepare_data
from framework.build.data.rows import Rows
from framework.build.sources.python_rows import RowsFromPython, take_rows
from framework.build.text.named_templates import read_template
from framework.errors import RequestError
from framework.installation import cache_folder
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
WriteRows = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache, which also keeps rows that are fast to make."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_cache, "LEAST_SECONDS", 0.0)
    return tmp_path / "cache" / "tunesmith" / "rows"


@pytest.fixture
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(read_template("chatml"), ("<|im_start|>", "<|im_end|>"))


@pytest.fixture
def path(write_rows: WriteRows) -> str:
    return write_rows("a.jsonl", [{"text": f"row {number} " * (number % 7)} for number in range(50)])


def config(path: str, **options: Any) -> TrainingConfig:
    training, limit = options.pop("training", {}), options.pop("limit", 32)
    document = {"training": {"seed": 3, **training}, "model": {"model_max_length": limit}}
    return TrainingConfig.model_validate({**document, "data": {"train": [{"path": path}], **options}})


def was_read(data: Data) -> bool:
    return any("read from the cache" in note for note in data.report.notes)


def same(one: Rows | Packs | None, other: Rows | Packs | None) -> bool:
    return list(one or ()) == list(other or ())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_fraction": 0.2},
        {"packing": True},
        {"training": {"task": "pretrain"}},
    ],
)
def test_rows_from_the_cache_are_the_rows(
    options: dict[str, Any], path: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepare_data(config(path, **options), tokenizer)
    assert "rows cached for the next run" in made.report.notes[-1]
    monkeypatch.setattr(data_module, "read_splits", None)  # nothing is read again
    again = prepare_data(config(path, **options), tokenizer)
    assert was_read(again)
    assert same(again.train, made.train)
    assert same(again.eval, made.eval)
    assert (again.report.train, again.report.eval) == (made.report.train, made.report.eval)
    assert again.report.sources == made.report.sources
    assert str(again.report).partition("rows read from")[0] == str(made.report).partition("rows cached for")[0]


def test_pairs_and_labels_come_back(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "chosen": "b c", "rejected": f"d {number}"} for number in range(9)]
    labelled = [{"text": f"t {number}", "label": "xyz"[number % 3]} for number in range(9)]
    for name, content, task in (("p.jsonl", rows, "preference"), ("l.jsonl", labelled, "classification")):
        some = config(write_rows(name, content), training={"task": task})
        made, again = prepare_data(some, tokenizer), prepare_data(some, tokenizer)
        assert was_read(again)
        assert same(again.train, made.train)
        assert again.targets == made.targets


def test_arrays_are_mapped_and_reach_workers(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows("a.jsonl", [{"text": "one two three " * 5}] * 400)
    made, again = (prepare_data(config(path, limit=256), tokenizer) for _ in range(2))
    assert isinstance(again.train, Rows)
    assert isinstance(again.train.tokens, np.memmap)
    assert same(pickle.loads(pickle.dumps(again.train)), made.train)


def test_what_comes_after_the_rows_makes_no_new_entry(
    path: str, tokenizer: PreTrainedTokenizerFast, folder: Path, write_rows: WriteRows
) -> None:
    prepare_data(config(path), tokenizer)
    for options in (
        {"packing": True},
        {"workers": 2},
        {"group_by_length": True},
        {"training": {"learning_rate": 1e-3, "seed": 8}},
    ):
        assert was_read(prepare_data(config(path, **options), tokenizer)), options
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 16},
        {"truncation": "left"},
        {"training": {"task": "pretrain"}},
        {"eval_fraction": 0.1},
        {"supervise": "all"},
    ],
)
def test_what_makes_other_rows_is_made_anew(
    options: dict[str, Any], path: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    prepare_data(config(path), tokenizer)
    assert not was_read(prepare_data(config(path, **options), tokenizer))


def test_rows_to_evaluate_on_count(path: str, tokenizer: PreTrainedTokenizerFast) -> None:
    prepare_data(config(path), tokenizer)
    assert not was_read(prepare_data(config(path, eval=[{"path": path, "split": "train[:3]"}]), tokenizer))


def test_another_file_tokenizer_template_or_code_is_noticed(
    path: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hit() -> bool:
        return was_read(prepare_data(config(path), tokenizer))

    assert [hit(), hit()] == [False, True]
    facts = os.stat(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert [hit(), hit()] == [False, True]
    tokenizer.chat_template += " "
    assert [hit(), hit()] == [False, True]
    tokenizer.add_tokens(["row"])
    assert [hit(), hit()] == [False, True]
    assert not was_read(prepare_data(config(path), tokenizer, vocab_size=len(tokenizer)))
    monkeypatch.setattr(row_cache, "our_files", lambda: {"a.py": (1, 2)})
    assert not hit()


def test_it_can_be_switched_off(path: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    data = prepare_data(config(path, cache=False), tokenizer)
    assert data.report.notes == ()
    assert not folder.exists()


def test_fast_work_is_not_kept(
    path: str, tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "LEAST_SECONDS", 1000.0)
    assert prepare_data(config(path), tokenizer).report.notes == ()
    assert not folder.exists()


def test_rows_from_python_are_known_by_their_digest(tokenizer: PreTrainedTokenizerFast) -> None:
    def hit(rows: list[dict[str, str]]) -> bool:
        some, given = take_rows(
            TrainingConfig.model_validate({"model": {"model_max_length": 32}}), RowsFromPython(rows)
        )
        return was_read(prepare_data(some, tokenizer, given=given))

    assert [hit([{"text": "a b"}]), hit([{"text": "a b"}]), hit([{"text": "a c"}])] == [False, True, False]


def test_the_embedded_sources_are_no_datasets_of_the_hub(tokenizer: PreTrainedTokenizerFast) -> None:
    some = config("python_docstrings", training={"task": "classification"})
    folder = row_cache.RowCache(some, tokenizer, None).folder
    assert folder is not None
    assert row_cache.RowCache(some, tokenizer, None).folder == folder


def test_broken_rows_leave_nothing_behind(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    path = write_rows("a.jsonl", [{"text": "x"}] * 500 + [{"text": 5}])
    with pytest.raises(RequestError, match="expected text, not int 5"):
        prepare_data(config(path), tokenizer)
    assert not folder.exists()


def test_a_write_that_fails_leaves_nothing_and_is_reported(
    path: str, tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_cache.np, "save", full)
    data = prepare_data(config(path), tokenizer)
    assert "No space left on device" in data.report.notes[-1]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["rows.json", "train.tokens.npy", "train.offsets.npy"])
def test_a_damaged_entry_is_no_entry(damage: str, path: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    made = prepare_data(config(path), tokenizer)
    (entry,) = folder.iterdir()
    content = (entry / damage).read_bytes()
    (entry / damage).write_bytes(content[: len(content) // 2])
    again = prepare_data(config(path), tokenizer)
    assert not was_read(again)
    assert same(again.train, made.train)
    assert was_read(prepare_data(config(path), tokenizer))


def test_the_folder_is_held_to_its_limit(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_rows(f"{name}.jsonl", [{"text": f"{name} x"}] * 9) for name in "abc"]
    for path in paths[:2]:
        prepare_data(config(path), tokenizer)
    sizes = [sum(file.stat().st_size for file in entry.iterdir()) for entry in folder.iterdir()]
    assert was_read(prepare_data(config(paths[0]), tokenizer))
    monkeypatch.setattr(row_cache, "LIMIT", int(2.5 * max(sizes)))
    prepare_data(config(paths[2]), tokenizer)
    assert was_read(prepare_data(config(paths[0]), tokenizer))
    assert not was_read(prepare_data(config(paths[1]), tokenizer))


def test_entries_are_json_and_arrays(path: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    prepare_data(config(path), tokenizer)
    (entry,) = folder.iterdir()
    assert sorted(file.name for file in entry.iterdir()) == [
        "rows.json",
        "train.labels.npy",
        "train.offsets.npy",
        "train.tokens.npy",
    ]
    assert json.loads((entry / "rows.json").read_text())["train_report"]["read"] == 50
    assert cache_folder("rows") == folder

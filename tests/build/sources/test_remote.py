"""Rows of object stores and web servers: fetched once per version, cached where configured; and unreadable ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from framework.build.sources.find_files import PACKAGES, find_files
from framework.build.sources.sources import read_source
from framework.errors import RequestError
from framework.schema.data import DatasetParams, parse_split

KEY = "data.train[0]"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's file system in memory, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()


def put(store: Any, path: str, *texts: str) -> None:
    store.pipe(path, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def texts(url: str, split: str = "train") -> list[str]:
    source = read_source(DatasetParams(path=url, split=split), KEY)
    return [row["text"] for row in source.dataset]


def test_a_file_is_read_and_its_location_reported(store, tmp_path):
    put(store, "/bucket/rows.jsonl", "a", "b")
    source = read_source(DatasetParams(path="memory://bucket/rows.jsonl"), KEY)
    assert [row["text"] for row in source.dataset] == ["a", "b"]
    assert f"kept in {tmp_path}/cache/tunesmith/files" in source.description


def test_a_file_is_fetched_once_and_again_when_it_has_changed(store, monkeypatch):
    put(store, "/bucket/rows.jsonl", "a")
    assert texts("memory://bucket/rows.jsonl") == ["a"]
    fetched = []
    plain = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda self, *asked: fetched.append(asked) or plain(self, *asked))
    assert texts("memory://bucket/rows.jsonl") == ["a"]
    assert not fetched
    put(store, "/bucket/rows.jsonl", "a", "changed")
    assert texts("memory://bucket/rows.jsonl") == ["a", "changed"]
    assert len(fetched) == 1


def test_globs_and_folders_with_splits(store):
    put(store, "/bucket/train-0.jsonl", "a")
    put(store, "/bucket/deep/train-1.jsonl", "b")
    put(store, "/bucket/test-0.jsonl", "c")
    store.pipe("/bucket/README.md", b"no rows")
    assert texts("memory://bucket/train*.jsonl") == ["a"]
    assert sorted(texts("memory://bucket")) == ["a", "b"]
    assert texts("memory://bucket", "test") == ["c"]


def test_one_that_cannot_be_reached_is_as_it_was_fetched_before(store, monkeypatch):
    put(store, "/bucket/rows.jsonl", "a")
    assert texts("memory://bucket/rows.jsonl") == ["a"]

    def away(*asked: Any, **named: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(store), "info", away)
    source = read_source(DatasetParams(path="memory://bucket/rows.jsonl"), KEY)
    assert [row["text"] for row in source.dataset] == ["a"]
    assert "could not be reached; using the copy fetched before" in source.description
    with pytest.raises(RequestError, match=r"memory://bucket/other.jsonl cannot be read: no route to host"):
        texts("memory://bucket/other.jsonl")


def test_a_fetch_that_breaks_off_leaves_nothing(store, tmp_path, monkeypatch):
    put(store, "/bucket/rows.jsonl", "a")

    def half(self: Any, name: str, target: str) -> None:
        Path(target).write_text("{")
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", half)
        with pytest.raises(RequestError, match="connection reset"):
            texts("memory://bucket/rows.jsonl")
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert texts("memory://bucket/rows.jsonl") == ["a"]


@pytest.mark.parametrize("scheme", ["s3", "gs", "https"])
def test_a_driver_that_is_not_installed_is_named(scheme, monkeypatch):
    def absent(url: str) -> None:
        raise ImportError(f"Install {PACKAGES[scheme]}")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(RequestError) as raised:
        find_files(f"{scheme}://there/rows.jsonl", parse_split("train"), KEY)
    [problem] = raised.value.problems
    assert f"{scheme}:// cannot be read without {PACKAGES[scheme]}" in problem.message
    assert f"pip install {PACKAGES[scheme]}" in str(problem.expected)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none.jsonl", "there is nothing at memory://bucket/none.jsonl"),
        ("memory://bucket/page.pdf", "unsupported format"),
        ("memory://bucket/*.csv", "there are no data files"),
        ("s4://bucket/rows.jsonl", "there is no storage protocol s4://"),
        ("https://huggingface.co/datasets/o/n/blob/main/rows.jsonl", "is a page about a file"),
    ],
)
def test_what_is_not_there_or_not_read_is_reported(store, url, message):
    store.pipe("/bucket/page.pdf", b"")
    with pytest.raises(RequestError, match=message):
        find_files(url, parse_split("train"), KEY)

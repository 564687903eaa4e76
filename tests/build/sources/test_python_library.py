"""The embedded source of labelled texts."""

import json
from collections import Counter

import pytest

from framework.build.sources.python_library import LEAST_CHARACTERS, PACKAGES
from framework.build.sources.sources import Source, read_source
from framework.schema.choices import RowFormat
from framework.schema.data import DatasetParams
from framework.schema.tasks import Task


@pytest.fixture(scope="module")
def source() -> Source:
    """Read once: that parses a hundred modules."""
    return read_source(DatasetParams(path="python_docstrings"), "data.train", Task.CLASSIFICATION)


def test_docstrings_are_labelled_with_a_package_that_they_do_not_name(source: Source) -> None:
    rows = [{**row, "label": json.loads(row["label"])} for row in source.dataset]
    counted = Counter(row["label"] for row in rows)
    assert set(counted) == set(PACKAGES)
    assert min(counted.values()) >= 100
    assert not [row for row in rows if row["label"] in row["text"].lower()]
    assert min(len(row["text"]) for row in rows) >= LEAST_CHARACTERS
    texts = [row["text"] for row in rows]
    assert len(set(texts)) == len(texts)


def test_it_is_a_source_of_labelled_rows_whose_places_are_files_and_lines(source: Source) -> None:
    assert source.row_format is RowFormat.LABELLED
    first = next(iter(source.dataset))
    assert first["path"].startswith("asyncio/")
    assert first["row"] > 0

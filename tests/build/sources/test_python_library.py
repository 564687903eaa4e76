"""The embedded source of labelled texts."""

from collections import Counter

from framework.build.sources.python_library import LEAST_CHARACTERS, PACKAGES, standard_docstrings
from framework.build.sources.sources import read_source
from framework.schema.choices import RowFormat, Task
from framework.schema.data import DatasetParams


def test_docstrings_are_labelled_with_a_package_that_they_do_not_name() -> None:
    rows = [row for _, records in standard_docstrings() for _, row in records]
    counted = Counter(row["label"] for row in rows)
    assert set(counted) == set(PACKAGES)
    assert min(counted.values()) >= 100
    assert not [row for row in rows if row["label"] in row["text"].lower()]
    assert min(len(row["text"]) for row in rows) >= LEAST_CHARACTERS
    texts = [row["text"] for row in rows]
    assert len(set(texts)) == len(texts)


def test_it_is_a_source_of_labelled_rows_whose_places_are_files_and_lines() -> None:
    source = read_source(DatasetParams(path="python_docstrings"), "data.train", Task.CLASSIFICATION)
    assert source.form is RowFormat.LABELLED
    first = next(iter(source.dataset))
    assert first["path"].startswith("asyncio/")
    assert first["row"] > 0

import pickle
from itertools import pairwise

import numpy as np
import pytest

from framework.build.data.rows import Rows, join_rows, split_document, supervised_count, truncate
from framework.build.text.labels import IGNORED, Encoded
from framework.schema.choices import Truncation


def encoded(length: int, supervised_from: int = 1) -> Encoded:
    ids = np.arange(10, 10 + length, dtype=np.int32)
    labels = ids.copy()
    labels[:supervised_from] = IGNORED
    return Encoded(ids, labels)


def test_rows_come_back_as_they_were_joined() -> None:
    rows = join_rows([encoded(3), encoded(1), encoded(5, supervised_from=4)])
    assert len(rows) == 3
    assert rows[0] == {"input_ids": [10, 11, 12], "labels": [-100, 11, 12]}
    assert rows[-1] == {"input_ids": [10, 11, 12, 13, 14], "labels": [-100, -100, -100, -100, 14]}
    assert [row["input_ids"] for row in rows[:2]] == [[10, 11, 12], [10]]
    assert rows.lengths.tolist() == [3, 1, 5]
    assert len(list(rows)) == 3
    with pytest.raises(IndexError):
        rows[3]


def test_rows_are_arrays_and_survive_pickling() -> None:
    rows = join_rows([encoded(1000)] * 100)
    assert rows.tokens.nbytes + rows.labels.nbytes == 8 * 100_000
    copy: Rows = pickle.loads(pickle.dumps(rows))
    assert copy[99] == rows[99]


def test_no_rows() -> None:
    assert len(join_rows([])) == 0


def test_truncation_right_and_left() -> None:
    row = encoded(10, supervised_from=6)
    right, left = truncate(row, 8, Truncation.RIGHT), truncate(row, 4, Truncation.LEFT)
    assert right is not None
    assert left is not None
    assert right.input_ids.tolist() == list(range(10, 18))
    assert supervised_count(right) == 2
    assert left.input_ids.tolist() == [16, 17, 18, 19]
    # The first token that is left has nothing before it any more, so its label goes.
    assert left.labels.tolist() == [IGNORED, 17, 18, 19]
    assert row.labels.tolist()[6:] == [16, 17, 18, 19]
    assert truncate(row, 9, Truncation.DROP) is None
    assert truncate(row, 10, Truncation.DROP) is row


@pytest.mark.parametrize("length", range(1, 20))
@pytest.mark.parametrize("limit", [2, 3, 7])
def test_split_document_predicts_every_token_once(length: int, limit: int) -> None:
    parts = list(split_document(encoded(length), limit))
    assert all(len(part.input_ids) <= limit for part in parts)
    supervised = [label for part in parts for label in part.labels.tolist() if label != IGNORED]
    assert supervised == list(range(11, 10 + length))
    for part in parts:
        assert part.labels[0] == IGNORED
    for before, after in pairwise(parts):
        assert after.input_ids[0] == before.input_ids[-1]
    assert length == 1 or all(supervised_count(part) for part in parts)

"""Whether a run that goes on reads what it began with: the tokens mean the same, and the training rows are the same.

A config names files, not what is in them; and a tokenizer that is built on the rows is another one when they change, so
that the weights of a checkpoint would stand for other words.
"""

import json
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from framework.build.packing import Packs
from framework.build.rows import Rows
from framework.errors import Problem, RequestError
from framework.run.inputs import Inputs

WHAT = {"model.tokenizer": "the tokenizer has other tokens", "data.train": "the training rows are others"}
"""What is compared, by the key that lets it differ."""


def read_digests(inputs: Inputs) -> dict[str, str]:
    """Of the tokenizer's vocabulary and of the training rows; of a stream its first block stands for all of it."""
    vocabulary = json.dumps(sorted(inputs.tokenizer.get_vocab().items()))
    train = inputs.data.train
    plain = train.rows if isinstance(train, Packs) else train
    found = {"model.tokenizer": f"{zlib.crc32(vocabulary.encode()):08x}"}
    return found | ({"data.train": f"{rows_checksum(plain):08x}"} if isinstance(plain, Rows) else {})


def rows_checksum(rows: Rows, found: int = 0) -> int:
    """Of all that is learnt from the rows, in their order before they are mixed."""
    for array in (rows.tokens, rows.labels, rows.offsets, rows.targets):
        if array is not None:
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found if rows.rejected is None else rows_checksum(rows.rejected, found)


def check_read(saved: Mapping[str, str], now: Mapping[str, str], allow: Sequence[str]) -> list[str]:
    """One line for each allowed difference; an older checkpoint that says nothing passes.

    Raises RequestError for the others.
    """
    changed = [key for key in WHAT if key in saved and key in now and saved[key] != now[key]]
    problems = [
        Problem(key, f"{WHAT[key]} than those that the run began with", expected=f"the same files, or --allow {key}")
        for key in changed
        if key not in allow
    ]
    if problems:
        raise RequestError(problems)
    return [f"{key}: {WHAT[key]}" for key in changed]

"""Truncation of rows to the length limit, with counts of everything lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from framework.build.data.report import EMPTY, SAME, SplitReport, length_quantiles
from framework.build.data.rows import Rows, join_rows, row_length, split_document, supervised_count, truncate
from framework.build.sources.sources import PROBLEM_LIMIT, Place
from framework.build.text.labels import Encoded, UnsuitedChat
from framework.build.text.messages import Remark
from framework.errors import Problem
from framework.schema.choices import Truncation
from framework.schema.plural import counted


@dataclass(frozen=True)
class RowPolicy:
    """Limits for every row."""

    limit: int
    """Maximum tokens of a row, at least 2."""
    truncation: Truncation
    """What happens to a longer row."""
    splits_documents: bool
    """Whether longer rows are split into several instead."""
    vocab_size: int | None
    """Upper bound of token ids; None if the model is not known yet."""


@dataclass
class RowCounts:
    """Rows processed so far, under one policy."""

    policy: RowPolicy
    key: str
    """Config key of the rows, such as `data.train`, for problems."""
    kept: list[Encoded] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    remarks: Counter[Remark] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    split: int = 0
    read: int = 0
    supervised: int = 0
    tokens_lost: int = 0
    supervised_lost: int = 0
    problems: list[Problem] = field(default_factory=list)
    first_dropped: str | None = None
    first_cut: str | None = None

    @property
    def is_full_of_problems(self) -> bool:
        return len(self.problems) >= PROBLEM_LIMIT

    def all_are_known(self, rows: Sequence[Encoded | UnsuitedChat | None]) -> bool:
        """Whether all tokens and labels of these rows are in the vocabulary; checked in bulk, since rows may be
        short."""
        single = [row for row in rows if isinstance(row, Encoded)]
        parts = [each for row in single for each in (row, row.rejected) if each is not None]
        found = [ids for part in parts for ids in (part.input_ids, part.labels) if len(ids)]
        vocab_size = self.policy.vocab_size
        return vocab_size is None or not found or int(np.concatenate(found).max()) < vocab_size

    def take(self, place: Place, row: Encoded | UnsuitedChat | None, is_known: bool = False) -> None:
        """Count the row and keep as much of it as the policy allows. None is an empty row; `is_known` says that its
        tokens were already checked."""
        self.read += 1
        if isinstance(row, Encoded):
            self.remarks.update(row.remarks if row.rejected is None else row.remarks | row.rejected.remarks)
        if isinstance(row, UnsuitedChat):
            self.problems.append(Problem(self.key, str(row), where=str(place)))
        elif row is None or not len(row.input_ids):
            self._drop(place, 0, EMPTY)
        elif _is_same_twice(row):
            self._drop(place, row_length(row), SAME)
        elif not self._refuse(place, row, length := row_length(row), is_known):
            supervised = supervised_count(row)
            self.lengths.append(length)
            self.supervised += supervised
            self._fit(place, row, length, supervised)

    def finish(self, name: str) -> tuple[Rows, SplitReport]:
        """The rows kept, and their report."""
        report = SplitReport(
            name=name,
            limit=self.policy.limit,
            read=self.read,
            dropped=dict(self.dropped),
            cut=self.cut,
            split=self.split,
            kept=len(self.kept),
            first_cut=self.first_cut,
            first_dropped=self.first_dropped,
            remarks={str(remark): count for remark, count in self.remarks.items()},
            lengths=length_quantiles(self.lengths),
            tokens=sum(self.lengths),
            tokens_lost=self.tokens_lost,
            supervised=self.supervised,
            supervised_lost=self.supervised_lost,
        )
        return join_rows(self.kept), report

    def _refuse(self, place: Place, row: Encoded, length: int, is_known: bool) -> bool:
        """Record a problem if the row is an error; returns whether it is."""
        vocab_size = self.policy.vocab_size
        if vocab_size is not None and not is_known and (outside := _outside(row, vocab_size)):
            message = f"{outside} is outside the model's vocabulary of {self.policy.vocab_size}"
        elif self.policy.truncation is Truncation.ERROR and length > self.policy.limit and not self._splits(row):
            message = (
                f"the row has {counted(length, 'token')} and the limit is {self.policy.limit} (data.truncation: error)"
            )
        else:
            return False
        self.problems.append(Problem(self.key, message, where=str(place)))
        return True

    def _splits(self, row: Encoded) -> bool:
        return self.policy.splits_documents and len(row.input_ids) > self.policy.limit

    def _fit(self, place: Place, row: Encoded, length: int, before: int) -> None:
        """Keep the part within the limit of a row with `length` tokens, `before` of them supervised."""
        if self._splits(row):
            self.kept.extend(part for part in split_document(row, self.policy.limit) if supervised_count(part))
            self.split += 1
            return
        fitted = truncate(row, self.policy.limit, self.policy.truncation)
        after = before if fitted is row else supervised_count(fitted) if fitted is not None else 0
        if fitted is None:
            self._drop(place, length, f"longer than {counted(self.policy.limit, 'token')}")
        elif not after:
            within = f" within {counted(self.policy.limit, 'token')}" if before else ""
            self._drop(place, length, f"no supervised token{within}")
        elif fitted is not row and _is_same_twice(fitted):
            after = 0
            self._drop(place, length, f"{SAME} within {counted(self.policy.limit, 'token')}")
        else:
            self.kept.append(fitted)
            self.cut += fitted is not row
            if fitted is not row and self.first_cut is None:
                self.first_cut = f"{place} has {counted(length, 'token')}"
        self.tokens_lost += length - (row_length(fitted) if fitted is not None and after else 0)
        self.supervised_lost += before - after

    def _drop(self, place: Place, length: int, reason: str) -> None:
        self.dropped[reason] += 1
        if self.first_dropped is None:
            self.first_dropped = f"{place} has {counted(length, 'token')}: {reason}"


def _is_same_twice(row: Encoded) -> bool:
    other = row.rejected
    return other is not None and np.array_equal(row.input_ids, other.input_ids)


def _outside(row: Encoded, vocab_size: int) -> str | None:
    """The highest token id or label if it is outside the vocabulary; rows may bring their own labels."""
    for what, ids in (("token id", row.input_ids), ("label", row.labels)):
        if (highest := int(ids.max())) >= vocab_size:
            return f"{what} {highest}"
    return None if row.rejected is None else _outside(row.rejected, vocab_size)

"""Report of the rows read, dropped, cut and kept. Always printed, so that no limit applies silently."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from framework.build.text.messages import Remark
from framework.schema.plural import counted

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
"""Quantiles of row lengths that are reported."""

WARNING_SHARE = 0.05
"""Supervised tokens lost above which a warning is given."""

ERROR_SHARE = 0.5
"""Supervised tokens lost above which the run is refused."""


@dataclass(frozen=True)
class Drawn:
    """Sampling of one source of a mixture."""

    path: str
    weight: float
    """Share of the draws, between 0 and 1."""
    kept: int
    """Rows of the source."""
    drawn: int
    """Rows sampled per epoch."""
    epochs: float
    """Epochs of the run."""

    def __str__(self) -> str:
        share, seen = f"{self.weight:.1%} {self.path}", self.drawn * self.epochs
        return (
            f"{share}: an epoch draws {counted(self.drawn, 'row')} of {self.kept}; the run sees {seen:.0f}, "
            f"each row {seen / max(self.kept, 1):.2g} times"
        )


@dataclass(frozen=True)
class SplitReport:
    """Counts of one split. Tokens and lengths are before truncation; a long document is one row."""

    name: str
    """`train` or `eval`."""
    limit: int
    """Maximum tokens of a row."""
    read: int
    """Rows read."""
    dropped: dict[str, int]
    """Reason -> rows."""
    cut: int
    """Rows that were truncated."""
    split: int
    """Long documents that became several rows."""
    kept: int
    """Rows to train on."""
    lengths: dict[str, int]
    """Quantile (`0.5` is the median) -> tokens."""
    tokens: int
    """Tokens of all rows read."""
    tokens_lost: int
    """Tokens lost by cutting and dropping."""
    supervised: int
    """Supervised tokens of all rows read."""
    supervised_lost: int
    """Of these, tokens lost by cutting and dropping."""
    packs: int | None = None
    """Number of packs; None without packing."""
    packed_tokens: int = 0
    """Tokens in them."""
    mixture: tuple[Drawn, ...] = ()
    """Sampling of each source, if they are mixed by weight."""
    mixing: str | None = None
    """The rule of the mixture."""
    stream: str | None = None
    """Which part of a stream was counted; None if all rows were."""

    remarks: dict[str, int] = field(default_factory=dict)
    """Possible mistake (`Remark`) -> number of rows, dropped ones included."""
    unread: dict[str, list[str]] = field(default_factory=dict)
    """Path of a source -> columns and fields of turns that its format does not use."""

    first_cut: str | None = None
    """Location and tokens of the first row that was cut."""
    first_dropped: str | None = None
    """Location of the first row that was dropped, and the reason."""

    @property
    def packing_efficiency(self) -> float:
        """Share of the packs' positions that hold a token."""
        return self.packed_tokens / max((self.packs or 0) * self.limit, 1)

    @property
    def supervised_lost_share(self) -> float:
        return self.supervised_lost / max(self.supervised, 1)

    def __str__(self) -> str:
        of = f" (a stream, {self.stream})" if self.stream else ""
        most = f"of at most {counted(self.limit, 'token')}"
        lines = [f"{self.name}{of}: {counted(self.read, 'row')} read, {counted(self.kept, 'row')} {most} kept"]
        if self.lengths:
            lines.append("  tokens per row: " + ", ".join(_quantile(share, at) for share, at in self.lengths.items()))
        if self.split:
            unpacked = " (no packing)" if self.packs is None else ""
            lines.append(
                f"  {counted(self.split, 'long document was', 'long documents were')} split into consecutive rows; "
                f"nothing is lost{unpacked}"
            )
        lines.extend(
            f"  dropped {counted(count, 'row')} ({_percent(count, self.read)}): {reason}"
            for reason, count in self.dropped.items()
        )
        if self.first_dropped:
            lines.append(f"    the first: {self.first_dropped}")
        lines.append(
            f"  cut {counted(self.cut, 'row')} ({_percent(self.cut, self.read)}); "
            f"lost {_percent(self.tokens_lost, self.tokens)} of the tokens, "
            f"{_percent(self.supervised_lost, self.supervised)} of the supervised tokens"
        )
        if self.first_cut:
            lines.append(f"    the first: {self.first_cut}")
        lines.extend(f"  {counted(count, 'row')} with {remark}" for remark, count in self.remarks.items())
        lines.extend(f"  not read of {path}: {', '.join(names)}" for path, names in self.unread.items())
        if self.mixture:
            lines.append(
                f"  mixed by weight, {self.mixing}: {counted(sum(each.drawn for each in self.mixture), 'row')} an epoch"
            )
            lines.extend(f"    {each}" for each in self.mixture)
        if self.packs is not None:
            rows = sum(each.drawn for each in self.mixture) or self.kept
            lines.append(
                f"  packed into {counted(self.packs, 'row')} of {self.limit} tokens, "
                f"{rows / max(self.packs, 1):.1f} rows in each: "
                f"{self.packing_efficiency:.1%} of the positions hold a token"
            )
        return "\n".join(lines)


@dataclass
class Account:
    """Report of a stream's rows so far, accumulated over its blocks."""

    report: SplitReport | None = None
    lengths: Counter[int] = field(default_factory=Counter)
    _blocks: int = 0
    _warned: set[str] = field(default_factory=set)

    def add(self, report: SplitReport, lengths: Sequence[int]) -> None:
        """Add a block, whose rows have these lengths."""
        self._blocks += 1
        self.lengths.update(lengths)
        both = [report] if self.report is None else [self.report, report]
        sums: dict[str, Any] = {name: sum(getattr(each, name) for each in both) for name in _COUNTS}
        for name in ("dropped", "remarks"):
            sums[name] = dict(sum((Counter(getattr(each, name)) for each in both), Counter()))
        sums["unread"] = merged_names(each.unread for each in both)
        for name in ("first_cut", "first_dropped"):
            sums[name] = next((getattr(each, name) for each in both if getattr(each, name)), None)
        sums["packs"] = None if report.packs is None else sum(each.packs or 0 for each in both)
        self.report = replace(report, **sums, lengths=_counted_quantiles(self.lengths), stream=SO_FAR)

    def close(self) -> None:
        """Mark the report as complete: it covers one epoch, and every epoch has the same rows."""
        if self.report is not None:
            self.report = replace(self.report, stream="one epoch")

    def news(self) -> list[str]:
        """Warnings of kinds not given yet; those of the first block are given before the run."""
        found = report_warnings(self.report) if self.report is not None else {}
        new = [text for kind, text in found.items() if kind not in self._warned and self._blocks != 1]
        self._warned.update(found)
        return new

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint, for `from_json`."""
        report = None if self.report is None else {**asdict(self.report), "mixture": ()}
        return {"report": report, "lengths": sorted(self.lengths.items()), "blocks": self._blocks}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Account":
        report = document["report"] and SplitReport(**{**document["report"], "mixture": ()})
        return cls(report, Counter(dict(document["lengths"])), document["blocks"])


SO_FAR = "so far"
"""`SplitReport.stream` of an unfinished stream."""

_COUNTS = (
    *("read", "cut", "split", "kept", "tokens", "tokens_lost", "supervised", "supervised_lost", "packed_tokens"),
)
"""Fields of a report that are summed over blocks."""


def merged_names(found: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The distinct names of each path."""
    merged: dict[str, dict[str, None]] = {}
    for each in found:
        for path, names in each.items():
            merged.setdefault(path, {}).update(dict.fromkeys(names))
    return {path: list(names) for path, names in merged.items()}


def report_warnings(report: SplitReport) -> dict[str, str]:
    """Warnings by kind, each with the key of its rows: rows left out, tokens lost to the limit, and possible
    mistakes."""
    name, read = report.name, max(report.read, 1)
    found = {
        reason: f"{count / read:.0%} of the rows of {name} are left out: {what}"
        for reason, what in _LEFT_OUT.items()
        if (count := report.dropped.get(reason, 0)) > WARNING_SHARE * read
    }
    if report.supervised_lost_share > ERROR_SHARE:  # only a stream gets here; otherwise it is an error
        found["most"] = f"{loss_message(report)}; without streaming this is an error"
    elif report.supervised_lost_share > WARNING_SHARE:
        found["lost"] = loss_message(report)
    for remark in Remark:
        if (count := report.remarks.get(remark, 0)) and count >= remark.least_share * read:
            share = f"{count:,} of {counted(report.read, 'row')} of {name} ({_percent(count, read)})"
            found[remark] = f"{share} have {remark}"
    return {kind: f"data.{name}: {warning}" for kind, warning in found.items()}


def loss_message(report: SplitReport) -> str:
    """Message about the tokens lost to the limit."""
    return (
        f"{report.supervised_lost_share:.1%} of the supervised tokens of {report.name} are lost to the limit of "
        f"{report.limit} tokens ({report.cut:,} of {counted(report.read, 'row')} cut, "
        f"{sum(report.dropped.values()):,} dropped)"
    )


EMPTY = "empty"
"""Reason to drop a row without a value in a required column."""

SAME = "the same answer twice"
"""Reason to drop a pair with equal answers, which has no gradient under any loss."""

_LEFT_OUT = {
    EMPTY: "a required column is absent or empty",
    SAME: "both answers of a pair are the same",
}
"""Reasons to drop a row that may be a mistake in the file, with their text."""


@dataclass(frozen=True)
class DataReport:
    """The report printed about the rows of a run."""

    sources: tuple[str, ...]
    """A line for each source: its rows, its format and how that was detected."""
    train: SplitReport
    eval: SplitReport | None
    notes: tuple[str, ...]
    """Decisions made for the user."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        splits = [str(split) for split in (self.train, self.eval) if split is not None]
        return "\n".join([*self.sources, *splits, *self.notes, *(f"warning: {text}" for text in self.warnings)])


def length_quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Lengths at each of QUANTILES, each the length of a row; empty without rows."""
    if not lengths:
        return {}
    found = np.quantile(np.asarray(lengths), QUANTILES, method="higher")
    return {str(share): int(length) for share, length in zip(QUANTILES, found, strict=True)}


def _counted_quantiles(lengths: Counter[int]) -> dict[str, int]:
    """`length_quantiles` of a histogram of lengths."""
    known = sorted(lengths)
    ranks = np.cumsum([lengths[length] for length in known])
    if not known:
        return {}
    wanted = [np.ceil(share * (ranks[-1] - 1)) for share in QUANTILES]
    found = np.searchsorted(ranks, wanted, side="right")
    return {str(share): known[int(at)] for share, at in zip(QUANTILES, found, strict=True)}


def _quantile(share: str, length: int) -> str:
    names = {"0.0": "shortest", "0.5": "median", "1.0": "longest"}
    return f"{names.get(share) or f'{float(share):.0%} have at most'} {length}"


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f} %" if not part or share >= 0.1 else f"{share:.2g} %"

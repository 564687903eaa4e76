"""Preview of a run's rows as its model will see them, from the tokens and labels of training."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from framework.build.data.batches import MicroBatch, eval_batches
from framework.build.data.packing import Packs
from framework.build.data.prepare import Data
from framework.build.data.report import QUANTILES, Account, DataReport, SplitReport, length_quantiles, report_warnings
from framework.build.data.rows import Row, Rows
from framework.build.data.stream import Stream
from framework.build.text.labels import IGNORED
from framework.build.text.tokenizer import padding_id
from framework.errors import Problem, RequestError
from framework.run.inputs import Inputs, read_inputs, training_batches
from framework.schema.config import TrainingConfig
from framework.schema.tasks import Task

STEPS_COUNTED = 200
"""Steps whose padding is counted: enough for a share accurate to a percent, in a second at most."""


@dataclass(frozen=True)
class Piece:
    """Text whose tokens are all supervised, or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Passage:
    """One document, answer or text as the model reads it."""

    name: str | None
    """Name of the passage in a row that has several."""
    tokens: int
    supervised: int
    relabelled: int
    """Supervised tokens whose label is another token: labels that came with the row."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ShownRow:
    """One row of a batch."""

    number: int
    """Row number in the split, as errors during training give it."""
    tokens: int
    passages: tuple[Passage, ...]
    """The row's text; for packed rows each document, for a pair the better answer, then the worse one."""
    target: str | None
    """Label of the whole row, as text."""


@dataclass(frozen=True)
class Padding:
    """Content of micro-batches, counted over the first steps of a run."""

    micro_batches: int
    rows: int
    """Most rows in one micro-batch."""
    positions: int
    """Tokens of all micro-batches, padding included."""
    tokens: int
    supervised: int
    longest: int
    """Tokens of the widest."""

    @property
    def share(self) -> float:
        """Share of padding."""
        return 1 - self.tokens / max(self.positions, 1)


@dataclass(frozen=True)
class Preview:
    """Statistics of the rows of a split, and the first of them, before training."""

    task: str
    report: DataReport
    split: SplitReport
    kept: dict[str, int]
    """Quantiles of row length: share of the rows -> most tokens."""
    padding: Padding
    classes: dict[str, int] | None
    """Class or judgment -> number of rows."""
    values: dict[str, float] | None
    """Quantiles of the target, if rows have a number: share of the rows -> largest value."""
    rows: tuple[ShownRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, described in docs/data.md."""
        split = {**asdict(self.split), "supervised_lost_share": self.split.supervised_lost_share}
        if self.split.packs is not None:
            split["packing_efficiency"] = self.split.packing_efficiency
        return {
            "task": self.task,
            "sources": list(self.report.sources),
            "split": split,
            "kept_lengths": self.kept,
            "batches": {**asdict(self.padding), "padding_share": self.padding.share},
            "classes": self.classes,
            "values": self.values,
            "notes": list(self.report.notes),
            "warnings": list(self.report.warnings),
            "rows": [asdict(row) for row in self.rows],
        }


def preview(config: TrainingConfig, split: str, count: int, whole: bool = False) -> Preview:
    """The first `count` rows of a split (`train` or `eval`), and statistics of all. Loads no weights.

    For a stream the statistics cover its first block, or with `whole` one epoch. Raises RequestError for rows that
    training would refuse, and if there is no such split.
    """
    if whole and not (config.data.streaming and split == "train"):
        message = "is for streams, whose first rows are read otherwise; these rows are read completely"
        raise RequestError([Problem("--all", message, expected="leave it out")])
    inputs = read_inputs(config)
    data, config = inputs.data, inputs.config
    rows, report = (data.train, data.report.train) if split == "train" else (data.eval, data.report.eval)
    if rows is None or report is None:
        raise RequestError(
            [Problem("--split", "there are no rows to evaluate on", None, "data.eval or data.eval_fraction")]
        )
    account = data.report
    if whole and data.stream is not None:
        of_first_block, report = report_warnings(report).values(), _counted(data.stream)
        others = (warning for warning in account.warnings if warning not in of_first_block)
        account = replace(account, train=report, warnings=(*others, *report_warnings(report).values()))
    held = rows.rows if isinstance(rows, Packs) else rows
    shown = (show_row(index, rows[index], inputs) for index in range(min(count, len(rows))))
    return Preview(
        task=str(config.training.task),
        report=account,
        split=report,
        kept=length_quantiles(held.lengths.tolist()),
        padding=count_padding(_batches(config, inputs, rows, split)),
        classes=_classes(held, data, config.training.task),
        values=_values(held, config.training.task),
        rows=tuple(shown),
    )


def _counted(stream: Stream) -> SplitReport:
    """Read one epoch and count what becomes of its rows. Raises RequestError for the first unreadable one."""
    account = Account()
    for block in stream.blocks(0):
        account.add(block.report, block.lengths)
    account.close()
    assert account.report is not None, "its first block was read before"
    return account.report


def show_row(number: int, row: Row, inputs: Inputs) -> ShownRow:
    """Decode a row for display."""
    tokenizer, task = inputs.tokenizer, inputs.config.training.task
    is_alone = "rejected" not in row  # all pairs have the same target: the chosen one
    target = _target(row["target"], inputs.data, task) if "target" in row and is_alone else None
    parts = list(_parts(row))
    found = tuple(_passage(tokenizer, name if len(parts) > 1 else None, ids, labels) for name, ids, labels in parts)
    tokens = max(each.tokens for each in found) if "rejected" in row else len(row["input_ids"])
    return ShownRow(number, tokens, found, target)


def _parts(row: Row) -> Iterator[tuple[str, list[int], list[int]]]:
    """Name, tokens and labels of each passage."""
    if "rejected" in row:
        yield "chosen", row["input_ids"], row["labels"]
        yield "rejected", row["rejected"]["input_ids"], row["rejected"]["labels"]
        return
    edges = [0, *np.cumsum(row.get("documents") or [len(row["input_ids"])]).tolist()]
    for index, (start, end) in enumerate(pairwise(edges), 1):
        yield f"document {index}", row["input_ids"][start:end], row["labels"][start:end]


def count_padding(batches: Iterator[MicroBatch]) -> Padding:
    """Count rows, tokens and padding of micro-batches."""
    count, rows, positions, tokens, supervised, longest = 0, 0, 0, 0, 0, 0
    for batch in batches:
        count += 1
        rows = max(rows, batch["input_ids"].shape[0])
        positions += batch["input_ids"].numel()
        mask = batch.get("attention_mask")
        tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())
        supervised += int((batch["labels"] != IGNORED).sum())
        longest = max(longest, batch["input_ids"].shape[1])
    return Padding(count, rows, positions, tokens, supervised, longest)


def _batches(config: TrainingConfig, inputs: Inputs, rows: Rows | Packs, split: str) -> Iterator[MicroBatch]:
    if split == "eval":
        pad = padding_id(inputs.tokenizer)
        batches = eval_batches(
            rows, config.eval_rows, pad, padding_free=config.data.padding_free, multiple=config.padded(1)
        )
        return islice(batches, STEPS_COUNTED)
    # Without worker processes: the batches are the same, and a preview should leave nothing running.
    here = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})
    made = training_batches(here, inputs, None)
    steps = min(-(-len(rows) // config.batch.global_size), STEPS_COUNTED)  # for a stream those of its first block
    return chain.from_iterable(islice(made.start(0), steps))


def _passage(
    tokenizer: PreTrainedTokenizerBase, name: str | None, ids: Sequence[int], labels: Sequence[int]
) -> Passage:
    supervised = [label != IGNORED for label in labels]
    other = sum(label not in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return Passage(name, len(ids), sum(supervised), other, tuple(_pieces(tokenizer, ids, supervised)))


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], supervised: Sequence[bool]) -> Iterator[Piece]:
    """Decode runs of supervised and other tokens. A run's text is what it adds to the text so far, since one token may
    be half a character."""
    edges = [0, *(at for at in range(1, len(ids)) if supervised[at] != supervised[at - 1]), len(ids)]
    before = ""
    for start, end in pairwise(edges):
        text = _decoded(tokenizer, ids[:end])
        is_longer = text.startswith(before)
        yield Piece(text[len(before) :] if is_longer else _decoded(tokenizer, ids[start:end]), supervised[start])
        before = text


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _target(target: Sequence[float], data: Data, task: Task) -> str:
    if task is Task.PREFERENCE:
        return "good" if target[0] else "bad"
    if data.targets is None or not data.targets.names:
        return ", ".join(f"{value:g}" for value in target)
    names = data.targets.names
    if not data.targets.several:
        return names[int(target[0])]
    return ", ".join(name for name, value in zip(names, target, strict=True) if value) or "none"


def _classes(rows: Rows, data: Data, task: Task) -> dict[str, int] | None:
    if rows.targets is None:
        return None
    values = rows.targets if rows.order is None else rows.targets[rows.order]
    if task is Task.PREFERENCE:
        return {"good": int(values.sum()), "bad": int(len(values) - values.sum())}
    if data.targets is None or not data.targets.names:
        return None
    names = data.targets.names
    counts = values.sum(0) if data.targets.several else np.bincount(values[:, 0].astype(int), minlength=len(names))
    return dict(zip(names, map(int, counts), strict=True))


def _values(rows: Rows, task: Task) -> dict[str, float] | None:
    if task.facts.label != "value" or rows.targets is None or rows.targets.shape[1] > 1:
        return None
    found = np.quantile(rows.targets[:, 0], QUANTILES, method="higher")
    return {str(share): float(value) for share, value in zip(QUANTILES, found, strict=True)}

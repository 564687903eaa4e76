"""Preparation of a run's rows: reading, rendering, tokenizing, truncating, checking and counting."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from framework.build.data.mixing import EvalSets, find_sets, mixture, pack_sets, shares_of
from framework.build.data.packing import Packs, pack
from framework.build.data.report import (
    ERROR_SHARE,
    DataReport,
    Drawn,
    SplitReport,
    loss_message,
    merged_names,
    report_warnings,
)
from framework.build.data.row_cache import Fitted, RowCache
from framework.build.data.rows import Rows, row_progress
from framework.build.data.stream import ENCODE_BATCH, Stream, columns_of, in_parts
from framework.build.data.truncation import RowCounts, RowPolicy
from framework.build.sources.files import Fault
from framework.build.sources.python_rows import NO_ROWS, PythonRows, RowsFromPython
from framework.build.sources.row_table import RowTable
from framework.build.sources.sources import OpenSource, Place, Source, gather, join_sources, open_source, read_sources
from framework.build.text.classes import Targets, WrongLabel, coarse_values, find_classes, find_values
from framework.build.text.encode import Encoding, row_texts
from framework.build.text.row_formats import require_answers, require_learnable
from framework.build.text.stored_rows import check_prompts, encode_batch
from framework.errors import Problem, RequestError
from framework.schema.choices import Mixing, RowFormat, Supervise
from framework.schema.config import TrainingConfig
from framework.schema.data import DatasetParams, Datasets
from framework.schema.plural import counted
from framework.schema.tasks import Task

HELD_OUT, TOKENIZER_TEXTS = 1, 2
"""Spawn keys of random streams from the run's seed, in addition to those of `epoch_order` and packing."""


@dataclass(frozen=True)
class Data:
    """Training and evaluation rows of a run, with their report."""

    train: Rows | Packs
    eval: Rows | Packs | None
    report: DataReport
    row_format: RowFormat
    """Row format of the first training source."""
    targets: Targets | None = None
    """Conversion of labels to targets, for rows with labels."""
    stream: Stream | None = None
    """The stream of training rows; `train` then has the rows of its first block."""
    eval_sets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Indices of the `eval` rows of each named set; empty without named sets."""


@dataclass(frozen=True)
class Splits:
    """Rows as read, with their sources for the report."""

    train: RowTable
    eval: RowTable | None
    sources: tuple[Source, ...]
    counts: tuple[int, ...]
    """Rows of each training source in `train`, in order."""

    @property
    def unread(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Unused columns and fields of the training rows and of the evaluation rows, by path."""
        train, held_out = self.sources[: len(self.counts)], self.sources[len(self.counts) :]
        found = merged_names(source.unread for source in train)
        return found, merged_names(source.unread for source in held_out) if held_out else found


def prepare_data(
    config: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    given: RowsFromPython = NO_ROWS,
    console: Console | None = None,
) -> Data:
    """Prepare all rows of a run. The same config gives the same rows on every rank.

    The config must be resolved: `model.model_max_length` is a number. `vocab_size` is the number of rows of the model's
    embedding, if known; `console` gets a progress bar if it is a terminal. Raises RequestError, before any weight is
    loaded, with all problems of a stage at once: sources; templates; rows; too much cut; nothing left.
    """
    if config.data.streaming:
        return _prepare_stream(config, tokenizer, vocab_size, given)
    cache = RowCache(config, tokenizer, vocab_size)
    fitted, kept = cache.read(), None
    if fitted is None:
        fitted = _fit(config, tokenizer, vocab_size, given, console)
        kept = cache.write(fitted)
    train, train_report = _arrange(fitted.train, fitted.train_report, config, fitted.kept)
    held_out, eval_report, sets = _arrange_held_out(fitted.eval, fitted.eval_report, config, fitted.eval_kept)
    notes = (*fitted.notes, *([kept] if kept else []))
    report = DataReport(fitted.sources, train_report, eval_report, notes, fitted.warnings)
    return Data(train, held_out, report, RowFormat(fitted.row_format), fitted.targets, eval_sets=sets)


def _fit(
    config: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    given: RowsFromPython,
    console: Console | None,
) -> Fitted:
    """Read, check, tokenize and truncate all rows."""
    splits = read_splits(config, given)
    encoding, warnings = _encoding(splits, config, tokenizer)
    policy = _policy(config, vocab_size)
    train, train_report, kept = _prepare_split(splits.train, "train", encoding, policy, config, splits.counts, console)
    held_out, eval_report, eval_kept = _fit_held_out(splits, encoding, policy, config)
    train_report = replace(train_report, unread=splits.unread[0])
    warnings = (*warnings, *_warnings_of(train_report, eval_report))
    descriptions = tuple(source.description for source in splits.sources)
    notes = _padding_note(tokenizer)
    row_format = str(splits.sources[0].row_format)
    notices = (descriptions, warnings, notes)
    return Fitted(train, train_report, kept, held_out, eval_report, eval_kept, row_format, *notices, encoding.targets)


def _fit_held_out(
    splits: Splits, encoding: Encoding, policy: RowPolicy, config: TrainingConfig
) -> tuple[Rows | None, SplitReport | None, tuple[int, ...]]:
    """The evaluation rows, if there are any, with the number kept of each source."""
    if splits.eval is None:
        return None, None, ()
    counts = [len(source.dataset) for source in splits.sources[len(splits.counts) :]]  # empty if held out
    rows, report, kept = _prepare_split(splits.eval, "eval", encoding, policy, config, counts)
    return rows, replace(report, unread=splits.unread[1]), kept


def _prepare_stream(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, given: RowsFromPython
) -> Data:
    """The first block of a stream, and its evaluation rows."""
    opened = open_streams(config, given)
    splits = read_splits(config, given, opened)
    encoding, warnings = _encoding(splits, config, tokenizer)
    data, seed, policy = config.data, config.training.seed, _policy(config, vocab_size)
    stream = Stream(opened, encoding, policy, seed, data.shuffle_buffer, data.packing, data.mixing)
    block = next(stream.blocks(0))
    if not block.rows:
        raise RequestError([_nothing_left(block.report, block.first_dropped, config)])
    _require_little_lost(block.report, config.training.task)
    shares = shares_of(config.data.train) if stream.mixing is not Mixing.CONCATENATE else []
    drawn = tuple(f"{share:.1%} {source.path}" for share, source in zip(shares, config.data.train, strict=False))
    head = f"its first {counted(block.report.read, 'row')}" + (f"; sampled from {', '.join(drawn)}" if drawn else "")
    train, train_report = block.rows, replace(block.report, stream=head)
    fitted, eval_report, kept = _fit_held_out(splits, encoding, policy, config)
    held_out, eval_report, sets = _arrange_held_out(fitted, eval_report, config, kept)
    warnings = (*warnings, *_warnings_of(train_report, eval_report))
    descriptions = tuple(source.description for source in splits.sources)
    report = DataReport(descriptions, train_report, eval_report, _padding_note(tokenizer), warnings)
    return Data(train, held_out, report, splits.sources[0].row_format, encoding.targets, stream, sets)


def _encoding(
    splits: Splits, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Encoding, tuple[str, ...]]:
    """The encoding of the rows, and warnings. Raises RequestError for rows that do not fit the request."""
    require_learnable(config.data.supervise, splits.sources)
    require_answers(config.training, splits.sources)
    warnings = check_prompts(splits.sources, tokenizer)
    if tokenizer.eos_token_id is None and any(source.row_format is RowFormat.TEXT for source in splits.sources):
        warnings += ("the tokenizer has no end token, so the model does not learn to end a text",)
    if config.training.task.facts.label == "value":
        warnings += tuple(f"column `label`: {what}" for what in coarse_values(splits.train["label"]))
    margins = config.training.task is Task.REWARD
    supervise = config.data.supervise or (Supervise.ALL if config.training.task.facts.splits_documents else None)
    return Encoding(tokenizer, supervise, find_targets(splits, config), margins), warnings


def _policy(config: TrainingConfig, vocab_size: int | None) -> RowPolicy:
    limit = config.model.model_max_length
    if not isinstance(limit, int):
        raise TypeError("rows are prepared for a resolved config, with a known length")
    if limit < 2:
        message = "a row of one token has nothing to predict"
        raise RequestError([Problem("model.model_max_length", message, expected="at least 2")])
    return RowPolicy(
        limit=limit,
        truncation=config.data.truncation,
        splits_documents=config.training.task.facts.splits_documents,
        vocab_size=vocab_size,
    )


def _warnings_of(*reports: SplitReport | None) -> list[str]:
    return [warning for report in reports if report is not None for warning in report_warnings(report).values()]


def _padding_note(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    if tokenizer.padding_side != "left":
        return ()
    return ("the tokenizer pads on the left; training always pads on the right",)


def open_streams(config: TrainingConfig, given: RowsFromPython) -> list[OpenSource]:
    """The training sources for streaming. Raises RequestError with the problems of all."""

    def opened(index: int, source: DatasetParams) -> OpenSource:
        return open_source(source, f"data.train[{index}]", config.training.task, given.train, streamed=True)

    return gather(config.data.train, opened)


def read_splits(
    config: TrainingConfig, given: RowsFromPython = NO_ROWS, streams: Sequence[OpenSource] | None = None
) -> Splits:
    """Training and evaluation rows as read; `given` are rows from Python.

    Only the first rows of `streams` are read, as a sample. Raises RequestError with the problems of both.
    """
    data = config.data
    if not data.train:
        raise RequestError([Problem("data.train", "there is no data to train on", expected="a list of {path: ..}")])
    if config.training.eval_steps is not None and not data.eval and not data.eval_fraction:
        message = "evaluation is requested and there are no rows to evaluate on"
        raise RequestError([Problem("training.eval_steps", message, expected="data.eval or data.eval_fraction")])
    if streams is None:
        train, train_problems = _try_read(data.train, "data.train", config.training.task, given.train)
    else:
        train, train_problems = [stream.read(most=ENCODE_BATCH) for stream in streams], []
    held_out, eval_problems = _try_read(data.eval, "data.eval", config.training.task, given.eval)
    if train_problems or eval_problems:
        raise RequestError([*train_problems, *eval_problems])
    rows, counts = join_sources(train), tuple(len(source.dataset) for source in train)
    if held_out:
        return Splits(rows, join_sources(held_out), (*train, *held_out), counts)
    if not data.eval_fraction:
        return Splits(rows, None, tuple(train), counts)
    rest, chosen = hold_out(len(rows), data.eval_fraction, config.training.seed)
    ends = np.searchsorted(rest, np.cumsum(counts))
    left = rows.select(rest), rows.select(chosen)
    return Splits(*left, tuple(train), tuple(np.diff(ends, prepend=0).tolist()))


def hold_out(count: int, fraction: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(rest, held out): sorted indices of the rows to train on, and of a random `fraction`, at least one row.

    The seed decides. Raises RequestError if no row would be left to train on.
    """
    size = max(1, round(fraction * count))
    if size >= count:
        message = f"{fraction} of {counted(count, 'row')} leaves no row to train on"
        raise RequestError([Problem("data.eval_fraction", message)])
    order = _generator(seed, HELD_OUT).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def training_texts(config: TrainingConfig, given: RowsFromPython = NO_ROWS) -> Iterator[str]:
    """Texts of the training rows without held-out rows, in a random order given by the seed, to train a tokenizer.

    Raises RequestError as `read_splits` does.
    """
    if config.data.streaming:
        for source in open_streams(config, given):
            for part in in_parts(source.rows(), ENCODE_BATCH):
                yield from row_texts(columns_of([values for _, values in part if not isinstance(values, Fault)]))
        return
    rows = read_splits(config, given).train
    shuffled = rows.select(_generator(config.training.seed, TOKENIZER_TEXTS).permutation(len(rows)))
    for batch in shuffled.iter(batch_size=ENCODE_BATCH):
        yield from row_texts(batch)


def _prepare_split(
    rows: RowTable,
    name: str,
    encoding: Encoding,
    policy: RowPolicy,
    config: TrainingConfig,
    counts: Sequence[int] = (),
    console: Console | None = None,
) -> tuple[Rows, SplitReport, tuple[int, ...]]:
    """The truncated rows of a split, and the number kept of each source, of which `counts` were read."""
    row_counts, kept = RowCounts(policy, f"data.{name}"), list[int]()
    ends = np.cumsum(counts or [len(rows)]).tolist()
    with row_progress(name, len(rows), console) as done:
        for start, end in pairwise([0, *ends]):
            for batch in rows.select(range(start, end)).iter(batch_size=ENCODE_BATCH):
                places = map(Place, batch["path"], batch["row"])
                encoded = encode_batch(batch, encoding)
                are_known = row_counts.all_are_known(encoded)
                for place, row in zip(places, encoded, strict=True):
                    if not row_counts.is_full_of_problems:
                        row_counts.take(place, row, are_known)
                done(len(batch["row"]))
                if row_counts.is_full_of_problems:
                    break
            kept.append(len(row_counts.kept))
    if row_counts.problems:
        raise RequestError(row_counts.problems)
    prepared, report = row_counts.finish(name)
    if not prepared:
        raise RequestError([_nothing_left(report, row_counts.first_dropped, config)])
    _require_little_lost(report, config.training.task)
    return prepared, report, tuple(np.diff(kept, prepend=0).tolist())


def _require_little_lost(report: SplitReport, task: Task) -> None:
    if report.supervised_lost_share > ERROR_SHARE:
        expected = f"at least {report.lengths['0.95']}, which keeps 95 % of the rows whole"
        if task is Task.SFT:
            expected += "; or training.task=pretrain, which splits long texts instead"
        raise RequestError([Problem("model.model_max_length", loss_message(report), expected=expected)])


def _arrange(
    rows: Rows, report: SplitReport, config: TrainingConfig, kept: Sequence[int] = ()
) -> tuple[Rows | Packs, SplitReport]:
    """The rows of an epoch, mixed and packed if requested. `kept` is the number of rows of each source."""
    data, seed, arranged = config.data, config.training.seed, cast(Rows | Packs, rows)
    is_mixed = data.mixing is not Mixing.CONCATENATE and report.name == "train"
    if is_mixed:
        arranged = rows = replace(rows, order=mixture(data.train, kept, data.mixing, seed))
    if data.packing:
        arranged = packs = pack(rows, report.limit, seed)
        report = replace(report, packs=len(packs), packed_tokens=int(rows.lengths.sum()))
    if is_mixed and rows.order is not None:
        drawn = np.histogram(rows.order, bins=[0, *np.cumsum(kept)])[0].tolist()
        steps, epochs = config.training.max_steps, config.training.num_train_epochs
        epochs = epochs if steps is None else steps * config.batch.global_size / len(arranged)
        paths = [source.path for source in data.train]
        described = tuple(map(Drawn, paths, shares_of(data.train), kept, drawn, [epochs] * len(kept)))
        report = replace(report, mixture=described, mixing=str(data.mixing))
    return arranged, report


def _arrange_held_out(
    rows: Rows | None, report: SplitReport | None, config: TrainingConfig, kept: Sequence[int]
) -> tuple[Rows | Packs | None, SplitReport | None, EvalSets]:
    """Evaluation rows, packed if requested, and their named sets, which share no pack."""
    if rows is None or report is None:
        return None, None, {}
    sets = find_sets(config.data.eval, kept)
    if not sets or not config.data.packing:
        return *_arrange(rows, report, config), sets
    packs, sets = pack_sets(rows, sets, report.limit, config.training.seed)
    return packs, replace(report, packs=len(packs), packed_tokens=int(rows.lengths.sum())), sets


def find_targets(splits: Splits, config: TrainingConfig) -> Targets | None:
    """Conversion of labels to targets; None for tasks without labels. Classes are `data.labels`, else those of the
    training rows including held-out ones."""
    if not config.training.task.facts.label:
        return None
    labels = list(splits.train["label"])
    if splits.eval is not None and not config.data.eval:
        labels += splits.eval["label"]
    if config.training.task.facts.label == "value":
        return find_values(labels)
    try:
        return find_classes(labels, config.data.labels)
    except WrongLabel as wrong:
        expected = "names or whole numbers; values are for training.task=regression"
        raise RequestError([Problem("data.train", f"column `label`: {wrong}", expected=expected)]) from None


def _try_read(sources: Datasets, key: str, task: Task, given: PythonRows | None) -> tuple[list[Source], list[Problem]]:
    try:
        return read_sources(sources, key, task, given), []
    except RequestError as error:
        return [], list(error.problems)


def _nothing_left(report: SplitReport, first: str | None, config: TrainingConfig) -> Problem:
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
    try:
        per_step = f"; a step takes {config.batch.global_size}"
    except ValueError:
        per_step = ""
    steps = "planned optimizer steps: 0; " if report.name == "train" else "nothing is left to evaluate on; "
    dropped = sum(report.dropped.values())
    message = f"{steps}{counted(report.read, 'row')} read, {dropped} dropped ({reasons}), 0 kept{per_step}"
    return Problem(
        f"data.{report.name}",
        f"{message}. The first: {first}",
        expected="rows with a value in each required column, and a supervised answer that begins within "
        "model.model_max_length",
    )


def _generator(seed: int, stream: int) -> np.random.Generator:
    # The spawn key separates these streams from the epochs', which are seeded without one.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(stream,))))

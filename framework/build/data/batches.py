"""Batches: the rows of each optimizer step, in order, as tensors.

The order is a function of (seed, epoch) alone. A step's rows are divided into micro-batches, so that 8 rows x 1, 4 x 2,
2 x 4 and 1 x 8 see the same rows in the same order.
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from multiprocessing.connection import wait
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from framework.build.data.packing import Packs, document_lengths, end_to_end, mark_documents, on_device
from framework.build.data.rows import Row, Rows
from framework.build.model.heads import answers
from framework.build.text.labels import IGNORED
from framework.schema.config import Batch, TrainingConfig
from framework.schema.tasks import Task

MicroBatch: TypeAlias = dict[str, torch.Tensor]
"""`input_ids` and `labels`, int64 of shape (rows, longest row); `attention_mask` alike if a row is padded. If rows hold
several documents, the entries of `mark_documents`. If rows have a target, `targets`, float32 of shape (rows, numbers),
NaN for a row that does not count. With a precomputed reference, `reference`: log-probabilities of the sequences,
float32 of shape (sequences,)."""

GROUPED_STEPS = 50
"""Steps whose rows are sorted together, so that a step's lengths span a fiftieth of all."""

_STEPS_STREAM = 1
"""Stream of random numbers for the order of grouped steps, next to the epoch's own."""

Share: TypeAlias = tuple[tuple[int, ...], bool]
"""Rows of one micro-batch on one rank, and whether their labels count, which is false for a dummy batch (see
`shares`)."""


def collate(rows: Sequence[Row], pad_token_id: int, multiple: int = 1) -> MicroBatch:
    """Rows as one micro-batch, padded on the right with labels of -100, whatever side the tokenizer pads on. Its width
    is the longest row, rounded up to a multiple of `multiple`.

    Of pairs the better answers come first, then the worse ones in the same order. Without padding there is no
    `attention_mask`, since a mask of ones would disable the faster attention kernels.
    """
    targets = [row["target"] for row in rows if "target" in row]
    rows = [*rows, *(row["rejected"] for row in rows if "rejected" in row)]
    lengths = [len(row["input_ids"]) for row in rows]
    shape = (len(rows), -(-max(lengths) // multiple) * multiple)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = row["input_ids"]
        labels[index, :length] = row["labels"]
    batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
    if min(lengths) < shape[1]:
        batch["attention_mask"] = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).to(torch.int64)
    reference = [row["reference"] for row in rows if "reference" in row]
    if reference:
        batch["reference"] = torch.tensor(reference, dtype=torch.float32)
    if targets:
        batch["targets"] = torch.tensor(targets, dtype=torch.float32)
    if any("documents" in row for row in rows):
        batch |= mark_documents([row.get("documents") or [len(row["input_ids"])] for row in rows], shape[1])
    return batch


def full_batch(config: TrainingConfig, ids: torch.Tensor) -> MicroBatch:
    """The largest micro-batch, with these tokens of shape (rows, `TrainingConfig.longest`), all supervised.

    A packed row is one long document and one of a single token, which needs a mask and has the most attention pairs.
    With `padding_free` the rows are documents of one row. Both answers of a pair have full length; single answers are
    good. Tasks of rows have targets, and one of several rows is a token shorter: the mask that an encoder then gets
    costs more than the token.
    """
    training = config.training
    ids = ids.repeat(training.sequences_per_row, 1)
    rows, length = ids.shape
    batch = {"input_ids": ids, "labels": ids.clone()}
    if training.asks_reference_once:
        batch["reference"] = torch.zeros(rows, dtype=torch.float32, device=ids.device)
    if training.task is Task.PREFERENCE and not training.has_pairs:
        batch["targets"] = torch.ones((rows, 1), dtype=torch.float32, device=ids.device)
    if training.task.facts.is_of_rows:
        batch |= _judged(config, ids)
    if config.data.packing:
        batch |= on_device(ids.device, mark_documents([[length - 1, 1]] * rows, length))
    if config.data.padding_free:
        batch = {name: tensor.view(1, -1) for name, tensor in batch.items()}
        batch |= on_device(ids.device, mark_documents([[length] * rows], rows * length))
    return batch


def rows_and_tokens(config: TrainingConfig, batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Rows of a batch, and the tokens of the longest; with `padding_free` the rows are documents of one row."""
    if config.data.padding_free:
        (lengths,) = document_lengths(batch)
        return len(lengths), max(lengths)
    sequences, tokens = batch["input_ids"].shape
    return sequences // config.training.sequences_per_row, tokens


def _judged(config: TrainingConfig, ids: torch.Tensor) -> MicroBatch:
    """Padding mask and targets (the first class, or 0) of the largest micro-batch of a task of rows."""
    rows, length = ids.shape
    made = {}
    if length > 1 and (rows > 1 or length != config.model.model_max_length):
        made["attention_mask"] = torch.ones_like(ids)
        made["attention_mask"][-1, -1] = 0
    if config.training.task is Task.REWARD:
        return {**made, "targets": torch.zeros((rows // 2, 1), dtype=torch.float32, device=ids.device)}
    is_one_class = config.training.task.facts.label == "class" and config.data.multi_label is not True
    width = 1 if is_one_class else len(answers(config))
    made["targets"] = torch.zeros((rows, width), dtype=torch.float32, device=ids.device)
    return made


def epoch_order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the rows in one epoch: a permutation of range(rows)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(rows)


def order_by_length(lengths: npt.NDArray[np.int64], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the rows in one epoch in which the `size` rows of a step have similar lengths.

    A random order is divided into stretches of `GROUPED_STEPS` steps; each is sorted, longest first, and its steps are
    shuffled. Rows of a smaller last step stay last, sorted too.
    """
    order = epoch_order(len(lengths), seed, epoch)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, _STEPS_STREAM])))
    whole = len(order) // size * size
    found = []
    for start in range(0, len(order), GROUPED_STEPS * size):
        stretch = order[start : start + GROUPED_STEPS * size]
        left = stretch[max(0, whole - start) :]
        steps = _longest_first(stretch[: len(stretch) - len(left)], lengths).reshape(-1, size)
        found += [steps[generator.permutation(len(steps))].ravel(), _longest_first(left, lengths)]
    return np.concatenate(found)


def _longest_first(rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows[np.argsort(-lengths[rows], kind="stable")]


def longest_rows(lengths: npt.NDArray[np.int64], count: int) -> tuple[int, ...]:
    """Indices of the `count` longest rows (or fewer); among equal ones the first."""
    return tuple(np.argsort(-lengths, kind="stable")[:count].tolist())


def shares(rows: Sequence[int], per_device: int, world: int, rank: int) -> list[Share]:
    """One rank's micro-batches of a step's rows.

    Every rank gets the same number, since sharded ranks run collectives in each. If rows run out (the last step of an
    epoch), a rank without any gets a dummy batch: one of the step's rows, with labels that do not count.
    """
    across = per_device * world
    found: list[Share] = []
    for start in range(0, len(rows), across):
        mine = tuple(rows[start + rank * per_device : min(start + (rank + 1) * per_device, len(rows))])
        found.append((mine, True) if mine else ((rows[start],), False))
    return found


@dataclass(frozen=True)
class MicroBatches(Dataset[MicroBatch]):
    """Dataset of micro-batches by share; it runs in the worker processes."""

    rows: Sequence[Row]
    pad_token_id: int
    padding_free: bool = False
    multiple: int = 1

    def __getitem__(self, share: Share) -> MicroBatch:
        indices, counts = share
        rows = [self.rows[index] for index in indices]
        batch = collate([end_to_end(rows)] if self.padding_free else rows, self.pad_token_id, self.multiple)
        if not counts:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            if "targets" in batch:
                batch["targets"] = torch.full_like(batch["targets"], torch.nan)
        return batch


@dataclass(frozen=True)
class GlobalBatches:
    """Steps of the training rows for one rank. The last step of an epoch may be smaller.

    That needs no correction: the loss is a mean over the tokens of its step.
    """

    rows: Rows | Packs
    batch: Batch
    seed: int
    pad_token_id: int
    rank: int = 0
    workers: int = 0
    by_length: bool = False
    padding_free: bool = False
    multiple: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch.global_size)

    def epochs(self, step: int) -> float:
        """Epochs completed before optimizer step `step` (from 0)."""
        return step / self.steps_per_epoch

    def start(self, step: int) -> Iterator[list[MicroBatch]]:
        """Micro-batches of each step from `step` (from 0) on, without end.

        A step has `batch.accumulation` of them, or fewer at the end of an epoch. Raises ValueError without rows.
        """
        if not self.rows:
            raise ValueError("there are no rows to make batches of")
        micro_batches = MicroBatches(self.rows, self.pad_token_id, self.padding_free, self.multiple)
        batches = load(micro_batches, chain.from_iterable(self._steps(step)), self.workers)
        for step_shares in self._steps(step):
            yield [next(batches) for _ in step_shares]

    def rows_of(self, step: int) -> list[int]:
        """Indices of this rank's rows in optimizer step `step` (from 0); of a pack, all its rows."""
        return [row for share in self.shares_of(step) for row in share]

    def all_rows_of(self, step: int) -> list[int]:
        """Indices of all ranks' rows in step `step`."""
        ranks = (replace(self, rank=rank) for rank in range(self.batch.world))
        return list(dict.fromkeys(row for rank in ranks for row in rank.rows_of(step)))

    def shares_of(self, step: int) -> list[list[int]]:
        """Indices of this rank's rows in step `step`, by micro-batch."""
        shares = [list(share) for share, _ in next(self._steps(step))]
        packs = self.rows if isinstance(self.rows, Packs) else None
        return [[row for pack in share for row in packs.rows_of(pack)] for share in shares] if packs else shares

    def _steps(self, step: int) -> Iterator[list[Share]]:
        first_epoch, skipped = divmod(step, self.steps_per_epoch)
        size = self.batch.global_size
        for epoch in count(first_epoch):
            if self.by_length:
                order = order_by_length(self.rows.lengths, size, self.seed, epoch)
            else:
                order = epoch_order(len(self.rows), self.seed, epoch)
            for start in range(skipped * size, len(order), size):
                indices = order[start : start + size].tolist()
                yield shares(indices, self.batch.per_device, self.batch.world, self.rank)
            skipped = 0


def eval_batches(
    rows: Sequence[Row],
    per_device: int,
    pad_token_id: int,
    rank: int = 0,
    world: int = 1,
    padding_free: bool = False,
    multiple: int = 1,
    chosen: Sequence[int] | None = None,
) -> Iterator[MicroBatch]:
    """Batches of every row, or of the `chosen` ones, in order; each rank gets the same number of batches."""
    batches = MicroBatches(rows, pad_token_id, padding_free, multiple)
    numbers = range(len(rows)) if chosen is None else chosen
    return (batches[share] for share in shares(numbers, per_device, world, rank))


@dataclass(frozen=True)
class _Endless:
    """Sampler for the DataLoader, which needs an iterable rather than an iterator."""

    shares: Iterator[Share]

    def __iter__(self) -> Iterator[Share]:
        return self.shares


def load(batches: MicroBatches, wanted: Iterator[Share], workers: int) -> Iterator[MicroBatch]:
    """The `wanted` micro-batches, in order, made by `workers` processes, or in this one if 0."""
    if not workers:
        return (batches[share] for share in wanted)
    # Workers do not tokenize. This keeps the tokenizers library from warning, in each, that it was forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=_Endless(wanted),
        num_workers=workers,
        # Its own generator, because the loader draws a seed for its workers and must not move the run's random state.
        generator=torch.Generator(),
    )
    return from_workers(loader)


DYING = 2.0
"""Seconds to wait for the end of a process that has closed its sockets."""


class WorkersDied(RuntimeError):
    """A data worker was killed or crashed. New workers can make the batch."""


def from_workers(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Batches of a loader with workers. Raises WorkersDied if one of them has died.

    torch raises in a signal handler, wherever the process is, even in the middle of an update. Here the error is raised
    only by the next batch, for which torch checks its workers anyway.
    """
    is_main = threading.current_thread() is threading.main_thread()
    earlier = signal.getsignal(signal.SIGCHLD)
    made: Any = iter(loader)
    if is_main:
        signal.signal(signal.SIGCHLD, earlier)
    workers = getattr(made, "_workers", [])
    try:
        while True:
            try:
                batch = next(made)
            except StopIteration:
                return
            except Exception as error:
                if isinstance(error, OSError | EOFError):  # of the socket to a dying worker
                    ended = wait([worker.sentinel for worker in workers], DYING)
                    for worker in (each for each in workers if each.sentinel in ended):
                        worker.join(DYING)  # its threads may end later
                if dead := [worker for worker in workers if not worker.is_alive()]:
                    raise WorkersDied(f"a process that prepares batches {_end_of(dead[0].exitcode)}") from error
                raise
            yield batch
    finally:
        if workers:
            made._shutdown_workers()  # nothing else would end them


def _end_of(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), by a user or by the system when the host's memory ran out"
    if code == -signal.SIGBUS:
        return "died of SIGBUS: /dev/shm, through which batches come, is full"
    return f"died of {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"

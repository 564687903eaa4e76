"""Batches of a stream, made as they are needed.

Steps continue across the end of an epoch, so all have the same number of rows.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from framework.build.data.batches import MicroBatch, MicroBatches, from_workers, shares
from framework.build.data.report import Account
from framework.build.data.stream import Begun, Position, Stream
from framework.errors import Problem, RequestError
from framework.schema.config import Batch

AHEAD = 16
"""Steps that a worker makes ahead, for training while it makes the next block."""


@dataclass(frozen=True)
class Step:
    """One rank's part of an optimizer step."""

    micro_batches: list[MicroBatch]
    places: list[list[str]]
    """Locations of the rows of each micro-batch."""
    after: Position
    begun: list[Begun]
    problems: tuple[Problem, ...] = ()
    """Problems with the rows, which end the stream."""


@dataclass(frozen=True)
class Steps(IterableDataset[Step]):
    """Dataset of steps from a position on, the first `skipped` left out; it runs in the worker process."""

    stream: Stream
    start: Position
    skipped: int
    batch: Batch
    pad_token_id: int
    rank: int = 0
    padding_free: bool = False
    multiple: int = 1
    in_process: bool = False

    def __iter__(self) -> Iterator[Step]:
        if self.in_process:
            # The tokenizers library must not use threads, which do not survive a fork.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        rows, size = self.stream.rows(self.start), self.batch.global_size
        try:
            begun = [block for row in islice(rows, self.skipped * size) for block in row.begun]
            while True:
                step = list(islice(rows, size))
                made = MicroBatches([each.row for each in step], self.pad_token_id, self.padding_free, self.multiple)
                taken = shares(range(len(step)), self.batch.per_device, self.batch.world, self.rank)
                places = [[str(place) for index in share for place in step[index].places] for share, _ in taken]
                begun += [block for row in step for block in row.begun]
                yield Step([made[share] for share in taken], places, step[-1].after, begun)
                begun = []
        except RequestError as error:  # an exception of a worker would reach the run as text
            yield Step([], [], self.start, [], error.problems)


@dataclass
class Progress:
    """Position of a run in its stream."""

    positions: dict[int, Position] = field(default_factory=lambda: {0: Position()})
    """Step (from 0) -> position of its first row; for the first step and those around the latest."""
    account: Account = field(default_factory=Account)
    counted: tuple[int, int] = (-1, -1)
    """Epoch and number of the last counted block."""
    began: tuple[int, int] | None = None
    """Epoch and number of the first counted block."""
    step: int = -1
    """The latest step; `places` are the locations of its rows."""
    places: list[list[str]] = field(default_factory=list)

    def take(self, number: int, step: Step, repeats: bool) -> None:
        """Record a step. With `repeats` each epoch has the same rows, so one epoch is counted. Raises RequestError for
        problems with the rows."""
        if step.problems:
            raise RequestError(step.problems)
        before = self.positions[number] if number in self.positions else Position()
        self.positions = {0: Position(), number: before, number + 1: step.after}
        self.step, self.places = number, step.places
        for block in step.begun:
            at = (block.epoch, block.number)
            if at <= self.counted:
                continue
            self.counted, self.began = at, self.began or at
            if not repeats or block.epoch == self.began[0]:
                self.account.add(block.report, block.lengths)
            elif self.began[1] == 0:
                self.account.close()

    def to_json(self) -> dict[str, Any]:
        """The counts for a checkpoint."""
        return {"counted": self.counted, "began": self.began, **self.account.to_json()}

    def go_on(self, document: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self.counted, self.began = tuple(document["counted"]), document["began"] and tuple(document["began"])
        self.account = Account.from_json(document)


@dataclass(frozen=True)
class StreamedBatches:
    """Steps of a stream for one rank. Every step has `batch.global_size` rows."""

    stream: Stream
    batch: Batch
    pad_token_id: int
    rank: int = 0
    workers: int = 0
    """0, or 1 for a process that reads and tokenizes during training."""
    padding_free: bool = False
    multiple: int = 1
    progress: Progress = field(default_factory=Progress)

    def start(self, step: int) -> Iterator[list[MicroBatch]]:
        """Micro-batches of each step from `step` (from 0) on, without end.

        Raises RequestError if rows cannot be read.
        """
        known = max(number for number in self.progress.positions if number <= step)
        position = self.progress.positions[known]
        steps = Steps(
            self.stream,
            position,
            step - known,
            self.batch,
            self.pad_token_id,
            self.rank,
            self.padding_free,
            self.multiple,
            in_process=bool(self.workers),
        )
        for number, made in enumerate(_loaded(steps, self.workers), step):
            self.progress.take(number, made, self.stream.repeats)
            yield made.micro_batches

    def go_on(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the start of `step` from a checkpoint, as returned by `state_at`; older ones have no counts of the
        rows."""
        self.progress.positions[step] = Position(**{name: state[name] for name in ("epoch", "block", "taken")})
        if "account" in state:
            self.progress.go_on(state["account"])

    def state_at(self, step: int) -> dict[str, Any]:
        """State for a checkpoint: the start of `step`, and the counts of the rows until then."""
        return {**self.position(step).to_json(), "account": self.progress.to_json()}

    def position(self, step: int) -> Position:
        """Position of the first row of `step`, which is the latest step or the next."""
        return self.progress.positions[step]

    def rows_of(self, step: int) -> list[str]:
        """Locations of the rows of `step`; empty unless it is the latest."""
        return [place for places in self.shares_of(step) for place in places]

    def shares_of(self, step: int) -> list[list[str]]:
        """Locations of the rows of `step` by micro-batch; empty unless it is the latest."""
        return self.progress.places if step == self.progress.step else []

    def epochs(self, step: int) -> float:
        """Epochs completed before `step`."""
        return float(self.position(step).epoch)


def _loaded(steps: Steps, workers: int) -> Iterator[Step]:
    if not workers:
        return iter(steps)
    loader = DataLoader(
        steps,
        batch_size=None,
        num_workers=1,
        prefetch_factor=AHEAD,
        collate_fn=_as_it_is,
        # Its own generator, because the loader draws a seed for its workers and must not move the run's random state.
        generator=torch.Generator(),
    )
    return from_workers(loader)


def _as_it_is(step: Any) -> Any:
    return step

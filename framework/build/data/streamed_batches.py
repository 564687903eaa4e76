"""Batches of a stream: which rows an optimizer step sees, as tensors, made as they are needed.

Steps go on over the end of an epoch, so each has as many rows as every other.
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
"""Steps that a process makes ahead: while it makes the next block, the run goes on with these."""


@dataclass(frozen=True)
class Step:
    """What one rank takes in one optimizer step."""

    micro_batches: list[MicroBatch]
    places: list[list[str]]
    """Where the rows of each micro batch come from."""
    after: Position
    begun: list[Begun]
    problems: tuple[Problem, ...] = ()
    """What is wrong with the rows, which end the stream."""


@dataclass(frozen=True)
class Steps(IterableDataset[Step]):
    """The steps from a position on, `skipped` of them passed over; what a worker process holds."""

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
            # The tokenizers library must not use threads, which a fork does not take along.
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
        except RequestError as error:  # what a process raises would reach the run as a text
            yield Step([], [], self.start, [], error.problems)


@dataclass
class Progress:
    """How far a run has got in its stream."""

    positions: dict[int, Position] = field(default_factory=lambda: {0: Position()})
    """Step (0 is the first) -> where its rows begin; of the first step and of those around the latest."""
    account: Account = field(default_factory=Account)
    counted: tuple[int, int] = (-1, -1)
    """Epoch and number of the last block in the account."""
    began: tuple[int, int] | None = None
    """Epoch and number of the first one."""
    step: int = -1
    """The latest step, and where its rows come from."""
    places: list[list[str]] = field(default_factory=list)

    def take(self, number: int, step: Step, repeats: bool) -> None:
        """Note a step; `repeats`: each epoch has the same rows, so that those of one are counted. Raises RequestError
        for what is wrong with the rows."""
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
        """The account for a checkpoint."""
        return {"counted": self.counted, "began": self.began, **self.account.to_json()}

    def go_on(self, document: Mapping[str, Any]) -> None:
        """Go on from the account of a checkpoint."""
        self.counted, self.began = tuple(document["counted"]), document["began"] and tuple(document["began"])
        self.account = Account.from_json(document)


@dataclass(frozen=True)
class StreamedBatches:
    """The rows of a stream in steps, for one rank. Every step has `batch.global_size` rows."""

    stream: Stream
    batch: Batch
    pad_token_id: int
    rank: int = 0
    workers: int = 0
    """0, or 1 for a process that reads and tokenises during training."""
    padding_free: bool = False
    multiple: int = 1
    progress: Progress = field(default_factory=Progress)

    def start(self, step: int) -> Iterator[list[MicroBatch]]:
        """From optimizer step `step` (0 is the first) on without end, the micro batches of each step.

        Raises RequestError when rows cannot be read.
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
        """Let `step` begin where a checkpoint says, as `state_at` has it; an older one has no account of the rows."""
        self.progress.positions[step] = Position(**{name: state[name] for name in ("epoch", "block", "taken")})
        if "account" in state:
            self.progress.go_on(state["account"])

    def state_at(self, step: int) -> dict[str, Any]:
        """Where `step` begins, and the account of the rows until then, for a checkpoint."""
        return {**self.position(step).to_json(), "account": self.progress.to_json()}

    def position(self, step: int) -> Position:
        """Where `step` begins; it is one that was taken last, or the one after it."""
        return self.progress.positions[step]

    def rows_of(self, step: int) -> list[str]:
        """Where the rows of the latest step come from; nothing is kept of others."""
        return [place for places in self.shares_of(step) for place in places]

    def shares_of(self, step: int) -> list[list[str]]:
        """The same for each of its micro batches."""
        return self.progress.places if step == self.progress.step else []

    def epochs(self, step: int) -> float:
        """Whole epochs gone through before `step`."""
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

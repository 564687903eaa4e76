"""The record of a rehearsal: which blocks of memory were born and died, in which order, which operations ran;
and sizes of what was built. No torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from framework.schema.config import TrainingConfig


class Kind(StrEnum):
    """What a block of memory is for. The values are keys of `terms` in `plan --json`."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    AUTOCAST_COPIES = "autocast_copies"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    UNATTRIBUTED = "unattributed"


class Space(StrEnum):
    """Where a block sits. `managed` memory is on the card while it fits; `pinned` and `host` are host memory, `disk` is
    a file."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED = "pinned"
    HOST = "host"
    DISK = "disk"


RECOMPUTED = "recompute"
"""`Operation.phase` of what a checkpoint computes again during backward."""

TRANSFER = "transfer"
"""`Operation.name` of a copy between host and device, next to which the device computes."""

GATHER, REDUCE = "all_gather", "reduce"
"""`Operation.name` of what ranks exchange next to the computation; `bytes` are those that cross the link of one
card."""

EXCHANGE = "exchange"
"""`Operation.name` of what ranks exchange while the computation waits for it."""

GRAPH = "graph"
"""`Operation.name` of the start of a graph of compiled code, which costs the host and launches nothing."""

WAIT = "wait"
"""`Operation.name` of where the host waits until the device has done all that was launched."""

PREFETCH = "prefetch"
"""`Operation.name` of asking the driver for pages of managed memory, `tensors` states of one parameter."""

MODULE = "module"
"""`Operation.name` of the call of a module, which is Python code and launches nothing by itself."""

TAKE_OVER = "split_with_sizes_copy"
"""`Operation.name` of the copy that waits for the last gather."""


class Launcher(StrEnum):
    """The code that launches a kernel, which decides what a launch costs the host."""

    TORCH = "torch"
    """An operator of torch, through its dispatcher."""
    COMPILED = "compiled"
    """Code that Inductor has generated."""
    TRITON = "triton"
    """Python code, through triton's launcher; in a model mostly from an autograd function in Python."""
    BITSANDBYTES = "bitsandbytes"
    """Python code of bitsandbytes, through ctypes."""


class Operation(NamedTuple):
    """One operator call, for the roofline. `shape` is (batch, m, n, k) of a matrix product, (batch x heads, queries,
    keys, width of a head) of attention, and empty otherwise.

    A call that launches nothing (a view) has no bytes; it costs the host only.
    """

    name: str
    phase: str
    flops: int
    bytes: int
    dtype: str
    shape: tuple[int, ...] = ()
    launcher: Launcher = Launcher.TORCH
    tensors: int = 1
    """Tensors that one call updates: those of an operator over lists, or of our own kernel's table."""
    is_aligned: bool = True
    """Whether the rows of a product's matrices begin at even addresses."""


class Mark(NamedTuple):
    """From event `event` and operation `operation` on, `phase` is running.

    `empties_cache`: torch.cuda.empty_cache() is called there.
    """

    event: int
    phase: str
    operation: int = 0
    empties_cache: bool = False


@dataclass
class Trace:
    """Memory events in order. Event `i >= 0` is the birth of block `i`, event `~i` its death.

    `sizes` holds the bytes asked for, which the allocator rounds. Blocks of other spaces than the device are listed
    too, so that one trace tells the peak of each space.
    """

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)
    """Block -> the operation that made it, where that is known."""

    def bear(self, size: int, kind: Kind, space: Space = Space.DEVICE, stream: int = 0) -> int:
        """Record the birth of a block of `size` bytes and return its number."""
        block = len(self.sizes)
        self.sizes.append(size)
        self.kinds.append(kind)
        self.spaces.append(space)
        self.streams.append(stream)
        self.events.append(block)
        return block

    def bury(self, block: int) -> None:
        """Record the death of a block."""
        self.events.append(~block)

    def enter(self, phase: str, empties_cache: bool = False) -> None:
        """Record that `phase` begins."""
        self.marks.append(Mark(len(self.events), phase, len(self.operations), empties_cache))

    def repeat(self, first: int, last: int) -> None:
        """Append what happened from mark `first` to mark `last` once more, as it goes when it is done again.

        What was born there and outlived it (optimizer states, workspaces) is there already the second time: neither it
        nor the operation that made it comes again.
        """
        events = self.events[self.marks[first].event : self.marks[last].event]
        ended = {~event for event in events if event < 0}
        survivors = {event for event in events if event >= 0} - ended
        makers = {self.makers[block] for block in survivors if block in self.makers}
        again: dict[int, int] = {}
        for mark, following in zip(self.marks[first:last], self.marks[first + 1 : last + 1], strict=True):
            self.enter(mark.phase, mark.empties_cache)
            for event in self.events[mark.event : following.event]:
                if event >= 0 and event not in survivors:
                    again[event] = self.bear(
                        self.sizes[event], self.kinds[event], self.spaces[event], self.streams[event]
                    )
                elif event < 0 and ~event in again:
                    self.bury(again[~event])
            numbers = range(mark.operation, following.operation)
            self.operations += [self.operations[number] for number in numbers if number not in makers]


@dataclass(frozen=True)
class Footprint:
    """Sizes of a built and once stepped assembly, in bytes and counts.

    `trained_products` and `frozen_products` are the weights that each token is multiplied with.
    """

    total_parameters: int
    trainable_parameters: int
    weight_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]
    state_sizes: tuple[int, ...]
    state_spaces: tuple[Space, ...]
    export_bytes: int
    trained_products: int
    frozen_products: int
    home_sizes: tuple[int, ...] = ()
    """Blocks of a base that is kept in host memory."""
    streamed_bytes: int = 0
    """What crosses the link from there in one micro batch."""
    streamed_in_backward_bytes: int = 0
    """The part of it that comes while the backward pass goes on."""
    shards: int = 1
    """Devices that each weight is split over. All sizes but `export_bytes` are of one device's part."""
    repeated_bytes: int = 0
    """What some of those devices hold of the same, which is saved once."""

    sent_bytes: int = 0
    """What the first rank's host holds of a model that it loads for all, and sends."""

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: the trained weights as they are trained, and the optimizer's states."""
        return self.shards * (sum(self.trained_sizes) + sum(self.state_sizes)) - self.repeated_bytes


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal of load, evaluation, two steps and save recorded.

    `micro_batches` of each step were rehearsed; `read_values` names the operators that wanted values nobody has;
    `notes` and `cautions` are what the built objects had to say.
    """

    config: TrainingConfig
    trace: Trace
    footprint: Footprint
    micro_batches: int
    read_values: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

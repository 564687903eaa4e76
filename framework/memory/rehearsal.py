"""What a rehearsal hands to the planner. No torch."""

from dataclasses import dataclass

from framework.memory.trace import Space, Trace
from framework.schema.config import TrainingConfig


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
    `said` and `cautions` are what the built objects had to say.
    """

    config: TrainingConfig
    trace: Trace
    footprint: Footprint
    micro_batches: int
    read_values: tuple[str, ...]
    said: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

"""`TrainingConfig`: the one object that says everything a run was asked to do."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from framework.schema.choices import Attention, OnOutOfMemory
from framework.schema.data import DataParams
from framework.schema.facts import FREE, Facts, Resume, UsedWith
from framework.schema.fsdp import FSDPParams
from framework.schema.gpu import GPUParams
from framework.schema.model import ModelParams
from framework.schema.params import Integer, Params
from framework.schema.peft import PeftParams
from framework.schema.plural import counted
from framework.schema.training import TrainingParams

SCHEMA_VERSION = 1
"""Raised when a key is added or removed, so that a recipe can say what it needs."""

MOST_STATIC_LENGTHS = 8
"""Up to so many row lengths each gets compiled code of its own, which a GPU needs 8-10 s to make
(docs/evidence/speed.md, H100); for more, one code serves all lengths after the first."""
MOST_EVAL_ROWS = 8
"""Rows of a forward pass of evaluation where nobody says how many and training takes as many: transformers' default."""


@dataclass(frozen=True)
class Batch:
    """`global = per_device x accumulation x world`, in rows per optimizer step.

    `world` counts devices, or groups of `context` devices that share their rows, or of `tensor` that share matrices.
    """

    per_device: int
    accumulation: int
    world: int
    context: int = 1
    tensor: int = 1

    @property
    def global_size(self) -> int:
        return self.per_device * self.accumulation * self.world

    def __str__(self) -> str:
        return f"accumulation {self.accumulation} = {self.global_size} global / ({self.across})"

    @property
    def across(self) -> str:
        """How many rows all devices take at once, in words."""
        if self.context * self.tensor > 1:
            groups = f"{counted(self.world, 'group')} of {self.context * self.tensor} devices"
            shared = "row" if self.context > 1 else "matrix"
            return f"{self.per_device} per group x {groups} that share each {shared}"
        return f"{self.per_device} per device x {counted(self.world, 'device')}"


class TrainingConfig(Params):
    """A whole run, composed and typed. Any subset constructs; what a verb needs is checked by that verb."""

    schema_version: Annotated[Integer, Field(ge=1, le=SCHEMA_VERSION), FREE] = SCHEMA_VERSION
    """Version of the schema that the recipe was written for."""
    training: TrainingParams = TrainingParams()
    """How to train."""
    model: ModelParams = ModelParams()
    """What to train."""
    peft: Annotated[PeftParams, UsedWith("training.use_peft")] = PeftParams()
    """The adapter."""
    fsdp: Annotated[FSDPParams, Facts(resume=Resume.FREE)] = FSDPParams()
    """Sharding."""
    data: DataParams = DataParams()
    """The rows."""
    gpu: Annotated[GPUParams, Facts(resume=Resume.FREE)] = GPUParams()
    """The card to fit."""

    @property
    def is_replicated(self) -> bool:
        """Whether several devices, or groups that share each matrix, each hold the whole model and add up gradients."""
        return self.gpu.count > self.fsdp.tensor_parallel_size and not self.fsdp.is_sharded

    @property
    def has_first_adapter(self) -> bool:
        """Whether a preference is measured against the base with the adapter that the run goes on training."""
        starts_trained = self.training.use_peft and self.peft.adapter_path is not None
        return starts_trained and self.training.has_reference and not self.training.asks_reference_once

    @property
    def adds_up_after_backward(self) -> bool:
        """Whether they do so when backward is done, not next to it: a rank that runs out of memory tells the others
        before, and all of them make the step again."""
        return self.is_replicated and self.training.on_oom is OnOutOfMemory.SHRINK

    @property
    def context_size(self) -> int:
        """Devices that share each row."""
        if self.model.attn_implementation is not Attention.RING_ATTENTION:
            return 1
        return self.fsdp.context_parallel_size or self.gpu.count

    @property
    def sharing(self) -> int:
        """Devices that take the same rows: those that share each row, or each matrix."""
        return self.context_size * self.fsdp.tensor_parallel_size

    def padded(self, tokens: int) -> int:
        """The length of a micro batch whose longest row has `tokens`; rows that are shared are cut into equal parts."""
        multiple = math.lcm(self.data.pad_to_multiple_of or 1, 2 * self.context_size if self.context_size > 1 else 1)
        return -(-tokens // multiple) * multiple

    @property
    def longest(self) -> int:
        """Tokens in a row of the largest micro batch, padding included. Raises ValueError while the limit is open."""
        length = self.model.model_max_length
        if not isinstance(length, int):
            raise ValueError("the longest row is not known before model.model_max_length is resolved")
        return self.padded(length)

    @property
    def possible_lengths(self) -> int:
        """How many lengths a micro batch can have when rows are padded to a multiple; 0: any length."""
        multiple, length = self.data.pad_to_multiple_of, self.model.model_max_length
        return 0 if multiple is None or not isinstance(length, int) else self.longest // multiple

    @property
    def eval_rows(self) -> int:
        """Rows of a forward pass of evaluation: as written, else as many as in training, at most `MOST_EVAL_ROWS`.
        Raises ValueError while either is `auto`."""
        written = self.training.per_device_eval_batch_size
        if written == "auto":
            raise ValueError("the rows of evaluation are not known while they are `auto`")
        return written or min(MOST_EVAL_ROWS, self.batch.per_device)

    @property
    def batch(self) -> Batch:
        """The batch equation. Raises ValueError when the global batch does not divide, or a size is still `auto`."""
        training, shared = self.training, (self.context_size, self.fsdp.tensor_parallel_size)
        world = self.gpu.count // self.sharing
        micro, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
        if micro == "auto" or accumulation == "auto":
            raise ValueError("the batch is not known while one of its sizes is `auto`")
        if training.global_batch_size is None:
            return Batch(micro, accumulation or 1, world, *shared)
        derived, remainder = divmod(training.global_batch_size, micro * world or 1)
        if remainder or not derived or accumulation not in (None, derived):
            across = Batch(micro, 1, world, *shared).across
            raise ValueError(
                f"{training.global_batch_size} global is not {accumulation or 'a whole number'} x ({across})"
            )
        return Batch(micro, derived, world, *shared)

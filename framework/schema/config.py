"""`TrainingConfig`: the complete, typed configuration of a run."""

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
"""Incremented when a key is added or removed, so that a recipe can state what it needs."""

MOST_STATIC_LENGTHS = 8
"""Number of row lengths up to which code is compiled for each, which takes 8-10 s on a GPU (docs/evidence/speed.md,
H100); with more, the code for a dynamic length is used after the first."""
MOST_EVAL_ROWS = 8
"""Default maximum of rows per forward pass of evaluation, as in transformers."""


@dataclass(frozen=True)
class Batch:
    """`global = per_device x accumulation x world`, in rows per optimizer step.

    `world` counts devices, or groups of `context` (context parallel) or `tensor` (tensor parallel) devices.
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
        """Rows that all devices take at once, for a message."""
        if self.context * self.tensor > 1:
            groups = f"{counted(self.world, 'group')} of {self.context * self.tensor} devices"
            shared = "row" if self.context > 1 else "matrix"
            return f"{self.per_device} per group x {groups} that share each {shared}"
        return f"{self.per_device} per device x {counted(self.world, 'device')}"


class TrainingConfig(Params):
    """A run, composed and typed. Any subset can be constructed; each command checks what it needs."""

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
        """Whether several devices, or tensor-parallel groups, hold copies of the model and all-reduce gradients."""
        return self.gpu.count > self.fsdp.tensor_parallel_size and not self.fsdp.is_sharded

    @property
    def has_first_adapter(self) -> bool:
        """Whether the reference of a preference is the base with the adapter that the run continues."""
        starts_trained = self.training.use_peft and self.peft.adapter_path is not None
        return starts_trained and self.training.has_reference and not self.training.asks_reference_once

    @property
    def starts_from_rows(self) -> bool:
        """Whether the run begins with passes over training rows (`peft.lora_init: eva`)."""
        return self.training.use_peft and self.peft.starts_from_rows

    @property
    def adds_up_after_backward(self) -> bool:
        """Whether gradients are reduced after backward instead of during it, so that a rank that runs out of memory can
        signal the others and all retry the step."""
        return self.is_replicated and self.training.on_oom is OnOutOfMemory.SHRINK

    @property
    def context_size(self) -> int:
        """Devices of a context-parallel group."""
        if self.model.attn_implementation is not Attention.RING_ATTENTION:
            return 1
        return self.fsdp.context_parallel_size or self.gpu.count

    @property
    def sharing(self) -> int:
        """Devices that take the same rows: a context- or tensor-parallel group."""
        return self.context_size * self.fsdp.tensor_parallel_size

    def padded(self, tokens: int) -> int:
        """Length of a micro-batch whose longest row has `tokens`; context parallel needs equal parts."""
        multiple = math.lcm(self.data.pad_to_multiple_of or 1, 2 * self.context_size if self.context_size > 1 else 1)
        return -(-tokens // multiple) * multiple

    @property
    def longest(self) -> int:
        """Tokens of a row in the largest micro-batch, padding included. Raises ValueError before the limit is
        resolved."""
        length = self.model.model_max_length
        if not isinstance(length, int):
            raise ValueError("the longest row is not known before model.model_max_length is resolved")
        return self.padded(length)

    @property
    def possible_lengths(self) -> int:
        """Number of possible lengths of a micro-batch if rows are padded to a multiple; 0: any length."""
        multiple, length = self.data.pad_to_multiple_of, self.model.model_max_length
        return 0 if multiple is None or not isinstance(length, int) else self.longest // multiple

    @property
    def eval_rows(self) -> int:
        """Rows per forward pass of evaluation: as written, else as in training, at most `MOST_EVAL_ROWS`. Raises
        ValueError while either is `auto`."""
        written = self.training.per_device_eval_batch_size
        if written == "auto":
            raise ValueError("the rows of evaluation are not known while they are `auto`")
        return written or min(MOST_EVAL_ROWS, self.batch.per_device)

    @property
    def batch(self) -> Batch:
        """The batch equation. Raises ValueError if the global batch does not divide, or a size is still `auto`."""
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

"""What goes with rows that several devices share (`model.attn_implementation: ring_attention`), and what does not."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import Attention
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict

_RING, _SIZE = "model.attn_implementation", "fsdp.context_parallel_size"


def context_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Sizes that do not go into the devices, and what looks at more than one token outside of attention."""
    size, count = config.fsdp.context_parallel_size, config.gpu.count
    if config.model.attn_implementation is not Attention.RING_ATTENTION:
        if size not in (None, 1):
            message = f"{size} devices can share a row only where attention goes over all of them"
            yield Conflict((_SIZE, _RING), message, "model.attn_implementation: ring_attention")
        return
    if count == 1:
        message = "one device has no row to share"
        yield Conflict((_RING, "gpu.count"), message, "gpu.count of 2 or more, or --nproc; sdpa on one device")
    elif size == 1:
        yield Conflict((_SIZE, _RING), "with groups of one device no row is shared", f"2 to {count}, or sdpa")
    elif size is not None and count % size:
        fitting = [str(part) for part in range(2, count + 1) if not count % part]
        yield Conflict((_SIZE, "gpu.count"), f"{count} devices are not groups of {size}", ", ".join(fitting))
    yield from _of_rows(config)


def _of_rows(config: TrainingConfig) -> Iterator[Conflict]:
    """What a part of a row cannot tell."""
    training = config.training
    if not training.task.is_next_token:
        message = f"{training.task} needs whole rows, and each device has a part of them"
        yield Conflict((_RING, "training.task"), message, "sdpa, or task: sft or pretrain")
    for name in ("packing", "padding_free"):
        if getattr(config.data, name) is True:
            message = "several documents in a row that devices share are not kept separately"
            yield Conflict((_RING, f"data.{name}"), message, f"{name}: false, or sdpa")
    if training.neftune_noise_alpha is not None:
        message = "the size of the noise follows from whole rows, and each device has a part of them"
        yield Conflict(("training.neftune_noise_alpha", _RING), message, "unset, or sdpa")
    if training.use_peft and ADAPTERS[config.peft.peft_method].is_prompt:
        message = "tokens before the row would stand before each device's part of it"
        yield Conflict((_RING, "peft.peft_method"), message, "lora, or sdpa")
    if training.compile is True:
        message = "compiled regions would contain the exchange between devices: not tried"
        yield Conflict((_RING, "training.compile"), message, "training.compile: false")

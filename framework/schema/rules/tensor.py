"""Rules of matrices and rows that devices share (`fsdp.tensor_parallel_size`, `fsdp.context_parallel_size`)."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import (
    Attention,
    Fp8,
    MixedPrecision,
    OptimizerOffload,
    PeftSaveMode,
    ShardingStrategy,
)
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Shards, facts_of
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict

_SIZE = "fsdp.tensor_parallel_size"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


def tensor_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Sizes that do not go into the devices, and what needs whole matrices or was not tried with parts of them."""
    size = config.fsdp.tensor_parallel_size
    if size == 1:
        return
    yield from _groups(config, size)
    yield from _of_training(config)
    yield from _of_adapters(config)


def _groups(config: TrainingConfig, size: int) -> Iterator[Conflict]:
    count, fsdp = config.gpu.count, config.fsdp
    if count % size:
        fitting = [str(part) for part in range(2, count + 1) if not count % part]
        message = f"{counted(count, 'device is no group', 'devices are not groups')} of {size}"
        expected = ", ".join(fitting) or f"gpu.count of {size} or a multiple, or --nproc; 1 on one device"
        yield Conflict((_SIZE, "gpu.count"), message, expected)
    elif fsdp.enable_fsdp is True and count == size:
        message = "all devices share each matrix: there is no other group to split weights over"
        expected = f"enable_fsdp: false, or gpu.count={2 * size}"
        yield Conflict(("fsdp.enable_fsdp", _SIZE), message, expected)
    if config.model.attn_implementation is Attention.RING_ATTENTION:
        message = "devices share either rows or matrices: both at once is not built"
        yield Conflict((_SIZE, "model.attn_implementation"), message, "1, or another attn_implementation")
    if fsdp.is_sharded and fsdp.sharding_strategy in _HYBRID:
        message = "copies of shards of parts of a matrix are not tried"
        yield Conflict(("fsdp.sharding_strategy", _SIZE), message, str(ShardingStrategy.FULL_SHARD))
    if fsdp.is_on_host:
        message = "parts of a matrix whose gradients are in host memory are not tried"
        yield Conflict(("fsdp.cpu_offload", _SIZE), message, "false")


def _of_training(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    if not training.task.is_next_token:
        message = f"{training.task} with matrices that devices share is not tried"
        yield Conflict((_SIZE, "training.task"), message, "1, or task: sft or pretrain")
    if facts_of(training.optimizer).shards is not Shards.ELEMENTS:
        message = f"{training.optimizer} needs more of a matrix than a device has, or states that can be cut as it is"
        yield Conflict(("training.optimizer", _SIZE), message, "adamw_torch_fused, lion, sgd or anyprecision_adamw")
    if training.optimizer_offload not in (OptimizerOffload.NONE, "auto"):
        message = "states that leave the device are not saved in parts"
        yield Conflict(("training.optimizer_offload", _SIZE), message, "none")
    if training.compile is True:
        message = "compiled regions would contain the sums over devices: not tried"
        yield Conflict(("training.compile", _SIZE), message, "false")
    if training.fp8 is not Fp8.NONE:
        yield Conflict(("training.fp8", _SIZE), "fp8 products of parts of a matrix are not tried", "none")
    if training.mixed_precision_dtype is MixedPrecision.FP16:
        message = "a loss scale is not kept over gradients that each device has a part of"
        yield Conflict(("training.mixed_precision_dtype", _SIZE), message, config.gpu.instead_of_float16)


def _of_adapters(config: TrainingConfig) -> Iterator[Conflict]:
    peft = config.peft
    if not config.training.use_peft:
        return
    if not ADAPTERS[peft.peft_method].is_cut:
        message = f"{peft.peft_method} is not cut along with the matrix that it is beside"
        yield Conflict(("peft.peft_method", _SIZE), message, "lora or rslora")
    if peft.q_lora:
        message = "packed weights are not cut: their scales are no part of them"
        yield Conflict(("peft.q_lora", _SIZE), message, "false")
    if peft.lora_modules_to_save:
        message = "modules trained in full next to an adapter are not tried with matrices that devices share"
        yield Conflict(("peft.lora_modules_to_save", _SIZE), message, "[]")
    if peft.peft_save_mode is not PeftSaveMode.ADAPTER_ONLY:
        message = "the base is in parts, and would have to be gathered to be written"
        works = "adapter_only, and `tunesmith merge` afterwards"
        yield Conflict(("peft.peft_save_mode", _SIZE), message, works)


_RING, _CONTEXT_SIZE = "model.attn_implementation", "fsdp.context_parallel_size"


def context_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Sizes that do not go into the devices, and what looks at more than one token outside of attention."""
    size, count = config.fsdp.context_parallel_size, config.gpu.count
    if config.model.attn_implementation is not Attention.RING_ATTENTION:
        if size not in (None, 1):
            message = f"{size} devices can share a row only where attention goes over all of them"
            yield Conflict((_CONTEXT_SIZE, _RING), message, "model.attn_implementation: ring_attention")
        return
    if count == 1:
        message = "one device has no row to share"
        yield Conflict((_RING, "gpu.count"), message, "gpu.count of 2 or more, or --nproc; sdpa on one device")
    elif size == 1:
        yield Conflict((_CONTEXT_SIZE, _RING), "with groups of one device no row is shared", f"2 to {count}, or sdpa")
    elif size is not None and count % size:
        fitting = [str(part) for part in range(2, count + 1) if not count % part]
        yield Conflict((_CONTEXT_SIZE, "gpu.count"), f"{count} devices are not groups of {size}", ", ".join(fitting))
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

"""What goes with sharded weights (`fsdp.enable_fsdp`), and what does not."""

from collections.abc import Iterator

from framework.schema.choices import (
    CompileScope,
    Fp8,
    MixedPrecision,
    Optimizer,
    OptimizerOffload,
    PeftSaveMode,
    ShardingStrategy,
)
from framework.schema.config import TrainingConfig
from framework.schema.conflict import Conflict

_ON = "fsdp.enable_fsdp"
_PACKED = (
    *(Optimizer.ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.PAGED_ADAMW_32BIT, Optimizer.PAGED_ADAMW_8BIT),
    *(Optimizer.PAGED_LION_8BIT, Optimizer.ADAMW_TORCHAO_8BIT, Optimizer.ADAMW_TORCHAO_4BIT),
)
"""bitsandbytes' kernels do not take a part of a tensor (tried on two processes); torchao's states are not tried."""
_OF_MATRICES = (Optimizer.ADAFACTOR, Optimizer.GALORE_ADAMW, Optimizer.APOLLO_ADAMW)
"""Their update of a weight needs sums or projections over all of it (tried on two processes)."""
SHARDED_OPTIMIZERS = tuple(choice for choice in Optimizer if choice not in (*_PACKED, *_OF_MATRICES))
"""Optimizers that train, save and load with sharded weights (tests/run/test_sharded.py tries each)."""


def sharding_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """What cannot be sharded, and sharding that would split nothing."""
    fsdp = config.fsdp
    if fsdp.enable_fsdp is not True:
        return
    if config.gpu.count == 1:
        yield Conflict((_ON, "gpu.count"), "one device has nothing to split", "gpu.count of 2 or more, or --nproc")
    if not fsdp.is_sharded:
        for name in ("cpu_offload", "forward_prefetch"):
            if getattr(fsdp, name) is True:
                message = "with NO_SHARD every device holds all weights: nothing is gathered or kept on the host"
                yield Conflict((f"fsdp.{name}", "fsdp.sharding_strategy"), message, str(ShardingStrategy.FULL_SHARD))
        return
    yield from _unsharded_optimizers(config)
    yield from _unsharded_weights(config)


def _unsharded_optimizers(config: TrainingConfig) -> Iterator[Conflict]:
    training, key = config.training, "training.optimizer"
    choice = training.optimizer
    if choice in _PACKED:
        message = f"the states of {choice} cannot be sharded: they fail at the first step or at the save"
        works = "adamw_torch_fused (sharded), anyprecision_adamw (bf16 states), or fsdp.cpu_offload=true with adamw"
        yield Conflict((key, _ON), message, works)
    if choice in _OF_MATRICES:
        message = f"{choice} needs all of a weight to update any of it, and each device has a part"
        yield Conflict((key, _ON), message, "adamw_torch_fused, lion (half its states) or anyprecision_adamw")
    if training.optimizer_in_backward is True:
        message = "gradients are summed over the devices before they can be used"
        yield Conflict(("training.optimizer_in_backward", _ON), message, "false: sharded gradients are small")
    if training.optimizer_offload not in (OptimizerOffload.NONE, "auto"):
        message = "sharded states move with their weights"
        yield Conflict(("training.optimizer_offload", _ON), message, "none, or fsdp.cpu_offload=true")


def _unsharded_weights(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    if training.use_peft and config.peft.q_lora:
        message = "packed weights are not sharded: their scales are no part of them"
        works = "fsdp.enable_fsdp: false (each device holds the packed base), or peft.q_lora: false"
        yield Conflict(("peft.q_lora", _ON), message, works)
    if training.mixed_precision_dtype is MixedPrecision.FP16:
        message = "a loss scale is not kept over sharded gradients"
        yield Conflict(("training.mixed_precision_dtype", _ON), message, "bf16")
    if training.fp8 not in (Fp8.NONE, "auto"):
        yield Conflict(("training.fp8", _ON), "fp8 products of sharded weights are not tried", "none")
    if training.compile is True and training.compile_scope is CompileScope.MODEL:
        message = "blocks are gathered one by one, between which one graph of the model would break"
        yield Conflict(("training.compile_scope", _ON), message, str(CompileScope.BLOCK))
    if training.use_peft and config.peft.peft_save_mode is not PeftSaveMode.ADAPTER_ONLY:
        message = "the base is in parts, and would have to be gathered to be written"
        works = "adapter_only, and `tunesmith merge` afterwards"
        yield Conflict(("peft.peft_save_mode", _ON), message, works)
    if config.fsdp.cpu_offload is True and config.gpu.name == "cpu":
        message = "on the cpu the weights are in host memory anyway"
        yield Conflict(("fsdp.cpu_offload", "gpu.name"), message, "false")

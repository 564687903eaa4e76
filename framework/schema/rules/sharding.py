"""Rules about sharding, tensor parallel and context parallel (`fsdp`)."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import (
    Attention,
    CompileScope,
    Fp8,
    MixedPrecision,
    OnOutOfMemory,
    OptimizerOffload,
    PeftMethod,
    PeftSaveMode,
    ShardingStrategy,
    TorchDtype,
)
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Shards, facts_of
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict

_ON = "fsdp.enable_fsdp"


def sharding_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that cannot be sharded, and sharding that would split nothing."""
    fsdp = config.fsdp
    if fsdp.enable_fsdp is not True:
        return
    if config.gpu.count == 1:
        yield Conflict((_ON, "gpu.count"), "nothing to shard with one device", "gpu.count of 2 or more, or --nproc")
    if not fsdp.is_sharded:
        for name in ("cpu_offload", "forward_prefetch"):
            if getattr(fsdp, name) is True:
                message = "with NO_SHARD every device holds all weights: nothing is gathered or kept on the host"
                yield Conflict((f"fsdp.{name}", "fsdp.sharding_strategy"), message, str(ShardingStrategy.FULL_SHARD))
        return
    yield from _unsharded_optimizers(config)
    yield from _unsharded_weights(config)
    yield from _gathered_dtypes(config)


def _unsharded_optimizers(config: TrainingConfig) -> Iterator[Conflict]:
    training, key = config.training, "training.optimizer"
    choice, shards = training.optimizer, facts_of(training.optimizer).shards
    if shards is Shards.CODED:
        message = f"the states of {choice} cannot be sharded: they fail at the first step or at the save"
        pure = config.model.torch_dtype_str is TorchDtype.BFLOAT16 and not training.use_peft
        # bytes of states per device for 1e9 trained weights
        adamw, halves = (f"{count * 1e9 / config.gpu.count / (1 << 30):.1f} GiB" for count in (4 if pure else 8, 4))
        works = (
            f"adamw_torch_fused ({adamw} of states a device for each 1e9 trained weights), anyprecision_adamw "
            f"({halves}, with weights in bfloat16), or fsdp.cpu_offload=true with adamw_torch_fused ({adamw} of the "
            "host)"
        )
        yield Conflict((key, _ON), message, works)
    if shards is Shards.WHOLE:
        message = f"{choice} needs the full weight for an update, and each device has a shard"
        yield Conflict((key, _ON), message, "adamw_torch_fused, lion (half its states) or anyprecision_adamw")
    if training.optimizer_in_backward is True:
        message = "gradients must be summed over the devices before they are used"
        yield Conflict(("training.optimizer_in_backward", _ON), message, "false: sharded gradients are small")
    if training.optimizer_offload not in (OptimizerOffload.NONE, "auto"):
        message = "sharded states are offloaded with their weights"
        yield Conflict(("training.optimizer_offload", _ON), message, "none, or fsdp.cpu_offload=true")


def _unsharded_weights(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    if training.use_peft and config.peft.q_lora:
        yield from _quantized_base(config)
    if training.mixed_precision_dtype is MixedPrecision.FP16:
        message = "a loss scale is not kept over sharded gradients"
        yield Conflict(("training.mixed_precision_dtype", _ON), message, config.gpu.instead_of_float16)
    if training.fp8 is not Fp8.NONE:
        yield Conflict(("training.fp8", _ON), "fp8 products of sharded weights are not tested", "none")
    if training.compile is True and training.compile_scope is CompileScope.MODEL:
        message = "blocks are gathered one by one, which would break one graph of the model"
        yield Conflict(("training.compile_scope", _ON), message, str(CompileScope.BLOCK))
    if training.use_peft and config.peft.peft_save_mode is not PeftSaveMode.ADAPTER_ONLY:
        message = "the base is split, and would have to be gathered to be written"
        works = "adapter_only, and `tunesmith merge` afterwards"
        yield Conflict(("peft.peft_save_mode", _ON), message, works)
    if config.fsdp.cpu_offload is True and config.gpu.name == "cpu":
        message = "on the cpu the weights are in host memory anyway"
        yield Conflict(("fsdp.cpu_offload", "gpu.name"), message, "false")


def _quantized_base(config: TrainingConfig) -> Iterator[Conflict]:
    peft = config.peft
    if peft.q_lora_bits == 8:
        message = "8-bit weights cannot be sharded: bitsandbytes keeps their scales, and further copies, elsewhere"
        works = "4, or fsdp.enable_fsdp: false (each device holds the quantized base)"
        yield Conflict(("peft.q_lora_bits", _ON), message, works)
    if peft.peft_method is PeftMethod.DORA:
        message = "dora dequantizes the weights in each forward pass, and peft finds no scales at gathered ones"
        yield Conflict(("peft.peft_method", "peft.q_lora", _ON), message, "lora or rslora")
    if peft.peft_method is PeftMethod.IA3:
        message = "peft scales the outputs of quantized layers in float32 without autocast, as with sharded weights"
        yield Conflict(("peft.peft_method", "peft.q_lora", _ON), message, "lora or rslora")


def _gathered_dtypes(config: TrainingConfig) -> Iterator[Conflict]:
    """dtypes of sharded adapters: a unit with quantized weights is gathered in one dtype, in which their bytes are
    stored; VeRA's shared matrices are not gathered at all."""
    peft, held = config.peft, config.model.torch_dtype_str
    if not (config.fsdp.is_sharded and config.training.use_peft):
        return
    if peft.peft_method is PeftMethod.VERA and config.training.mixed_precision_dtype is MixedPrecision.BF16:
        message = "vera's shared matrices are not gathered, and keep another dtype than their inputs"
        yield Conflict(("peft.peft_method", "training.mixed_precision_dtype", _ON), message, "lora, or none")
    if not peft.q_lora:
        return
    is_pure = config.training.mixed_precision_dtype is MixedPrecision.NONE and held not in (None, TorchDtype.AUTO)
    if is_pure and peft.adapter_dtype not in (None, TorchDtype.AUTO, held):
        message = f"quantized weights and adapter are gathered together in one dtype, without autocast {held}"
        works = f"auto or {held}, or training.mixed_precision_dtype: bf16 (it gathers a float32 adapter in bfloat16)"
        yield Conflict(("peft.adapter_dtype", "peft.q_lora", _ON), message, works)


def ranks_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that do not work with several devices."""
    training, count = config.training, "gpu.count"
    if config.gpu.count == 1:
        return
    if training.on_oom is OnOutOfMemory.SHRINK and (config.fsdp.is_sharded or config.sharing > 1):
        by = "fsdp.enable_fsdp" if config.fsdp.is_sharded else "model.attn_implementation"
        by = "fsdp.tensor_parallel_size" if config.fsdp.tensor_parallel_size > 1 else by
        message = "ranks communicate in every layer and would wait there for one that runs out of memory: all stop"
        yield Conflict(("training.on_oom", by), message, "training.on_oom: stop")
    if training.optimizer_in_backward is True:
        message = "gradients are reduced over the ranks after backward, and would be used before"
        yield Conflict(("training.optimizer_in_backward", count), message, "optimizer_in_backward: false")
    if config.model.offload_frozen_base is True:
        message = "each rank would keep a copy of the base in host memory"
        yield Conflict(("model.offload_frozen_base", count), message, "offload_frozen_base: false")
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    if training.enable_gradient_checkpointing is True and reentrant:
        keys = ("training.gradient_checkpointing_kwargs.use_reentrant", count)
        message = "re-entrant checkpoints finish a gradient twice, which breaks the reduction over the ranks"
        yield Conflict(keys, message, "use_reentrant: false")


_SIZE = "fsdp.tensor_parallel_size"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


def tensor_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Sizes that do not divide the devices, and settings that need full matrices or are not tested with tensor
    parallel."""
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
        message = "all devices are in one tensor-parallel group: there is no other group to shard over"
        expected = f"enable_fsdp: false, or gpu.count={2 * size}"
        yield Conflict(("fsdp.enable_fsdp", _SIZE), message, expected)
    if config.model.attn_implementation is Attention.RING_ATTENTION:
        message = "context and tensor parallel cannot be combined"
        yield Conflict((_SIZE, "model.attn_implementation"), message, "1, or another attn_implementation")
    if fsdp.is_sharded and fsdp.sharding_strategy in _HYBRID:
        message = "hybrid sharding with tensor parallel is not tested"
        yield Conflict(("fsdp.sharding_strategy", _SIZE), message, str(ShardingStrategy.FULL_SHARD))
    if fsdp.is_on_host:
        message = "cpu_offload with tensor parallel is not tested"
        yield Conflict(("fsdp.cpu_offload", _SIZE), message, "false")


def _of_training(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    if not training.task.facts.is_next_token:
        message = f"{training.task} with tensor parallel is not tested"
        yield Conflict((_SIZE, "training.task"), message, "1, or task: sft or pretrain")
    if facts_of(training.optimizer).shards is not Shards.ELEMENTS:
        message = f"{training.optimizer} needs the full matrix, or its states cannot be split with it"
        yield Conflict(("training.optimizer", _SIZE), message, "adamw_torch_fused, lion, sgd or anyprecision_adamw")
    if training.optimizer_offload not in (OptimizerOffload.NONE, "auto"):
        message = "offloaded states cannot be saved with tensor parallel"
        yield Conflict(("training.optimizer_offload", _SIZE), message, "none")
    if training.compile is True:
        message = "compiled regions would contain all-reduces: not tested"
        yield Conflict(("training.compile", _SIZE), message, "false")
    if training.fp8 is not Fp8.NONE:
        yield Conflict(("training.fp8", _SIZE), "fp8 products with tensor parallel are not tested", "none")
    if training.mixed_precision_dtype is MixedPrecision.FP16:
        message = "a loss scale is not supported with tensor parallel"
        yield Conflict(("training.mixed_precision_dtype", _SIZE), message, config.gpu.instead_of_float16)


def _of_adapters(config: TrainingConfig) -> Iterator[Conflict]:
    peft = config.peft
    if not config.training.use_peft:
        return
    if not ADAPTERS[peft.peft_method].is_cut:
        message = f"{peft.peft_method} cannot be split along with its matrix"
        yield Conflict(("peft.peft_method", _SIZE), message, "lora or rslora")
    if peft.q_lora:
        message = "quantized weights cannot be split: their scales are stored separately"
        yield Conflict(("peft.q_lora", _SIZE), message, "false")
    if peft.lora_modules_to_save:
        message = "modules trained in full with an adapter are not tested with tensor parallel"
        yield Conflict(("peft.lora_modules_to_save", _SIZE), message, "[]")
    if peft.peft_save_mode is not PeftSaveMode.ADAPTER_ONLY:
        message = "the base is split, and would have to be gathered to be written"
        works = "adapter_only, and `tunesmith merge` afterwards"
        yield Conflict(("peft.peft_save_mode", _SIZE), message, works)


_RING, _CONTEXT_SIZE = "model.attn_implementation", "fsdp.context_parallel_size"


def context_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Sizes that do not divide the devices, and settings that need whole rows outside of attention."""
    size, count = config.fsdp.context_parallel_size, config.gpu.count
    if config.model.attn_implementation is not Attention.RING_ATTENTION:
        if size not in (None, 1):
            message = f"{size} devices can share a row only with attention over all of them"
            yield Conflict((_CONTEXT_SIZE, _RING), message, "model.attn_implementation: ring_attention")
        return
    if count == 1:
        message = "context parallel needs several devices"
        yield Conflict((_RING, "gpu.count"), message, "gpu.count of 2 or more, or --nproc; sdpa on one device")
    elif size == 1:
        yield Conflict((_CONTEXT_SIZE, _RING), "groups of one device share no row", f"2 to {count}, or sdpa")
    elif size is not None and count % size:
        fitting = [str(part) for part in range(2, count + 1) if not count % part]
        yield Conflict((_CONTEXT_SIZE, "gpu.count"), f"{count} devices are not groups of {size}", ", ".join(fitting))
    yield from _of_rows(config)


def _of_rows(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that need whole rows."""
    training = config.training
    if not training.task.facts.is_next_token:
        message = f"{training.task} needs whole rows, and each device has a part of them"
        yield Conflict((_RING, "training.task"), message, "sdpa, or task: sft or pretrain")
    for name in ("packing", "padding_free"):
        if getattr(config.data, name) is True:
            message = "documents in a row are not separated with context parallel"
            yield Conflict((_RING, f"data.{name}"), message, f"{name}: false, or sdpa")
    if training.neftune_noise_alpha is not None:
        message = "the size of the noise depends on whole rows, and each device has a part of them"
        yield Conflict(("training.neftune_noise_alpha", _RING), message, "unset, or sdpa")
    if training.use_peft and ADAPTERS[config.peft.peft_method].is_prompt:
        message = "tokens before the row would be put before each device's part of it"
        yield Conflict((_RING, "peft.peft_method"), message, "lora, or sdpa")
    if training.compile is True:
        message = "compiled regions would contain collectives: not tested"
        yield Conflict((_RING, "training.compile"), message, "training.compile: false")

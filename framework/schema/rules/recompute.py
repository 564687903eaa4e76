"""Rules about recomputation, compilation, offload and the allocator."""

from collections.abc import Iterator

from framework.schema.choices import (
    Attention,
    CheckpointingPolicy,
    CompileScope,
    MixedPrecision,
    OnOutOfMemory,
    OptimizerOffload,
    SdpaBackend,
    TorchDtype,
)
from framework.schema.config import MOST_STATIC_LENGTHS, TrainingConfig
from framework.schema.rules.conflict import Conflict


def compile_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A memory budget without the compiler, or with checkpointing."""
    training, key = config.training, "training.activation_memory_budget"
    if training.activation_memory_budget in (None, "auto"):  # a search leaves it unset where nothing is compiled
        return
    if training.compile is False:
        message = "only the compiler knows which activations of a block are cheap to recompute"
        yield Conflict((key, "training.compile"), message, "training.compile=true in addition")
    elif training.enable_gradient_checkpointing is True:
        message = "blocks are recomputed as a whole: the budget then only applies within the current block"
        keys = (key, "training.enable_gradient_checkpointing")
        yield Conflict(keys, message, "one of the two", is_warning=True)


def recorded_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that CUDA graphs cannot replay, since they run the same kernels on the same addresses at every step."""
    training, key = config.training, "training.cuda_graphs"
    if not training.cuda_graphs:
        return
    yield from _many_shapes(config)
    if training.enable_gradient_checkpointing is True:
        message = "torch 2.11 cannot record graphs whose inputs a checkpoint frees (tested on a card)"
        yield Conflict((key, "training.enable_gradient_checkpointing"), message, "one of the two")
    unplanned = {
        "gpu.count": config.gpu.count > 1,
        "training.compile_scope": training.compile_scope is CompileScope.MODEL,
        "training.activation_memory_budget": training.activation_memory_budget is not None,
        "training.optimizer_offload": training.optimizer_offload is not OptimizerOffload.NONE,
        "training.on_oom": training.on_oom is OnOutOfMemory.SHRINK,
        "peft.q_lora": training.use_peft and config.peft.q_lora,
        # The same blocks are recorded for the reference: 7.5 % more reserved than planned (H200).
        "training.preference.precompute_reference": training.use_peft
        and training.has_reference
        and not training.asks_reference_once,
    }
    for other in (name for name, is_asked in unplanned.items() if is_asked):
        yield Conflict((key, other), f"recorded kernels together with {other} are not planned", f"{key}: false")


def _many_shapes(config: TrainingConfig) -> Iterator[Conflict]:
    """Graphs of a micro-batch are recorded again for each sequence of lengths before it in a step."""
    try:
        length, micro_batches = config.model.model_max_length, config.batch.accumulation
    except ValueError:  # reported by `batch_conflicts`, or undecided
        return
    if not isinstance(length, int) or 1 <= config.possible_lengths**micro_batches <= MOST_STATIC_LENGTHS:
        return
    fewest = next(count for count in range(MOST_STATIC_LENGTHS, 0, -1) if count**micro_batches <= MOST_STATIC_LENGTHS)
    message = f"each sequence of lengths in a step is recorded, and there can be more than {MOST_STATIC_LENGTHS}"
    expected = f"data.pad_to_multiple_of of {-(-length // fewest)} or more, up to {length}"
    others = ("data.pad_to_multiple_of", "model.model_max_length", "training.gradient_accumulation_steps")
    yield Conflict(("training.cuda_graphs", *others), message, expected)


_VARIANT = "training.gradient_checkpointing_kwargs.use_reentrant"


def recompute_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Checkpoint policies and offload that conflict with other settings."""
    training, model = config.training, config.model
    policy, key = training.gradient_checkpointing_policy, "training.gradient_checkpointing_policy"
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    if training.activation_offload is True and training.compile is True:
        message = "tensors that compiled code keeps cannot be offloaded"
        nearest = "compile: false, or training.activation_memory_budget"
        yield Conflict(("training.activation_offload", "training.compile"), message, nearest)
    if training.enable_gradient_checkpointing is not True:
        return
    if reentrant and training.compile is True:
        yield Conflict((_VARIANT, "training.compile"), "the re-entrant checkpoint cannot be compiled", "false")
    if policy is CheckpointingPolicy.FULL:
        return
    if reentrant:
        message = "the re-entrant checkpoint keeps only inputs"
        yield Conflict((key, _VARIANT), message, "use_reentrant: false, or full")
    if training.compile is True:
        message = "the compiler decides what is kept, by training.activation_memory_budget"
        yield Conflict((key, "training.compile"), message, "full")
    if model.attn_implementation is Attention.FLEX_ATTENTION:
        message = "flex_attention runs as compiled code, whose results a policy cannot keep"
        yield Conflict((key, "model.attn_implementation"), message, "sdpa, or full")
    in_parts = Attention.EAGER is model.attn_implementation or SdpaBackend.MATH is model.sdpa_backend
    if policy is CheckpointingPolicy.SAVE_ATTENTION and in_parts:
        message = "this attention consists of many small operators, without a single result to keep"
        yield Conflict((key, "model.attn_implementation", "model.sdpa_backend"), message, "a fused kernel, or full")


EMPTYING_COSTS_BELOW = 10
"""Interval from which emptying the cache costs no measurable time (docs/evidence/speed.md: 1B on an H100, 2026-11)."""


def cache_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Emptying of the cache, and allocator settings without CUDA or without effect."""
    steps, key = config.training.empty_device_cache_steps, "training.empty_device_cache_steps"
    if steps is not None:
        message = "returns only unused blocks: the allocated peak stays the same"
        if config.gpu.name == "cpu":
            message = "the cpu has no cache of blocks: nothing is returned"
        elif steps < EMPTYING_COSTS_BELOW:
            message += "; every step costs 2.8 % of speed, every tenth nothing measurable (1B, H100, 2026-11)"
        nearest = "unset; for less memory training.enable_gradient_checkpointing, model.chunked_loss or fewer rows"
        yield Conflict((key, "gpu.name"), message, nearest, is_warning=True)
    allocator = config.training.allocator
    for name, value in allocator:
        if isinstance(value, int | float) and not isinstance(value, bool) and config.gpu.name == "cpu":
            message = "is a setting of CUDA's allocator, and this is the cpu"
            yield Conflict((f"training.allocator.{name}", "gpu.name"), message, "leave it unset")
    if allocator.expandable_segments is True and allocator.garbage_collection_threshold is not None:
        keys = ("training.allocator.garbage_collection_threshold", "training.allocator.expandable_segments")
        yield Conflict(keys, "has no effect: an expandable segment is never collected", "one of the two", True)


def streamed_base_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that conflict with a base streamed from the host block by block."""
    training, key = config.training, "model.offload_frozen_base"
    if config.model.offload_frozen_base is not True:
        return
    if not training.use_peft:
        message = "only frozen weights can stay on the host, and here the weights are trained"
        yield Conflict(
            (key, "training.use_peft"), message, "training.use_peft=true, or training.optimizer_offload=host"
        )
    if training.use_peft and config.peft.q_lora:
        message = "quantized weights cannot be streamed: their scales are stored separately"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: false, or only q_lora, at a quarter of the size")
    if training.compile is True:
        message = "a compiled block does not see that its weights are replaced"
        yield Conflict((key, "training.compile"), message, "training.compile: false")
    if config.fsdp.enable_fsdp is True:
        yield Conflict((key, "fsdp.enable_fsdp"), "sharded weights cannot be streamed", "fsdp.cpu_offload=true")
    if training.activation_offload is True:
        message = "views of streamed weights would be offloaded with the activations"
        yield Conflict((key, "training.activation_offload"), message, "training.enable_gradient_checkpointing=true")
    if config.gpu.name == "cpu":
        message = "saves nothing on the cpu: two blocks are held twice in the same memory"
        yield Conflict((key, "gpu.name"), message, "false", is_warning=True)
    is_cast = training.mixed_precision_dtype in (MixedPrecision.BF16, MixedPrecision.FP16)
    if is_cast and config.model.torch_dtype_str == TorchDtype.FLOAT32 and not training.enable_gradient_checkpointing:
        message = "autocast's half-precision copies of every block stay on the device until backward"
        nearest = "model.torch_dtype_str=bfloat16, or training.enable_gradient_checkpointing=true"
        yield Conflict((key, "model.torch_dtype_str"), message, nearest, is_warning=True)

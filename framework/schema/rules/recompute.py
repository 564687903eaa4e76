"""What is computed again, and what only the compiler decides."""

from collections.abc import Iterator

from framework.schema.choices import (
    Attention,
    CheckpointingPolicy,
    CompileScope,
    OnOutOfMemory,
    OptimizerOffload,
    SdpaBackend,
)
from framework.schema.config import MOST_STATIC_LENGTHS, TrainingConfig
from framework.schema.rules.conflict import Conflict


def compile_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """What only the compiler can do."""
    training, key = config.training, "training.activation_memory_budget"
    if training.activation_memory_budget is None:
        return
    if training.compile is False:
        message = "only the compiler can tell which activations of a block are cheap to compute again"
        yield Conflict((key, "training.compile"), message, "training.compile=true next to it")
    elif training.enable_gradient_checkpointing is True:
        message = "blocks are computed again as a whole: the budget is then only for the one block at work"
        keys = (key, "training.enable_gradient_checkpointing")
        yield Conflict(keys, message, "one of the two", is_warning=True)


def recorded_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """What CUDA graphs cannot replay: they compute the same kernels on the same addresses at every step."""
    training, key = config.training, "training.cuda_graphs"
    if not training.cuda_graphs:
        return
    yield from _many_shapes(config)
    if training.enable_gradient_checkpointing is True:
        message = "torch 2.11 records no graph whose inputs a checkpoint lets go (tried on a card)"
        yield Conflict((key, "training.enable_gradient_checkpointing"), message, "one of the two")
    apart = {
        "gpu.count": config.gpu.count > 1,
        "training.compile_scope": training.compile_scope is CompileScope.MODEL,
        "training.activation_memory_budget": training.activation_memory_budget is not None,
        "training.optimizer_offload": training.optimizer_offload is not OptimizerOffload.NONE,
        "training.on_oom": training.on_oom is OnOutOfMemory.SHRINK,
        "peft.q_lora": training.use_peft and config.peft.q_lora,
    }
    for other in (name for name, is_asked in apart.items() if is_asked):
        yield Conflict((key, other), f"recorded kernels together with {other} are not tried", f"{key}: false")


def _many_shapes(config: TrainingConfig) -> Iterator[Conflict]:
    """Graphs are recorded along a step: those of a micro batch again for each sequence of lengths before it."""
    try:
        length, micro_batches = config.model.model_max_length, config.batch.accumulation
    except ValueError:  # told by `batch_conflicts`, or open
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
    """What a checkpoint's policy cannot keep."""
    training, model = config.training, config.model
    policy, key = training.gradient_checkpointing_policy, "training.gradient_checkpointing_policy"
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    if training.activation_offload is True and training.compile is True:
        message = "compiled code hands nothing it keeps to the offload"
        nearest = "compile: false, or training.activation_memory_budget"
        yield Conflict(("training.activation_offload", "training.compile"), message, nearest)
    if training.enable_gradient_checkpointing is not True:
        return
    if reentrant and training.compile is True:
        yield Conflict((_VARIANT, "training.compile"), "the re-entrant checkpoint cannot be compiled", "false")
    if policy is CheckpointingPolicy.FULL:
        return
    if reentrant:
        message = "the re-entrant checkpoint keeps inputs alone"
        yield Conflict((key, _VARIANT), message, "use_reentrant: false, or full")
    if training.compile is True:
        message = "what compiled code keeps is decided when it is compiled, by training.activation_memory_budget"
        yield Conflict((key, "training.compile"), message, "full")
    if model.attn_implementation is Attention.FLEX_ATTENTION:
        message = "flex_attention runs as compiled code, whose results a policy cannot keep"
        yield Conflict((key, "model.attn_implementation"), message, "sdpa, or full")
    in_parts = Attention.EAGER is model.attn_implementation or SdpaBackend.MATH is model.sdpa_backend
    if policy is CheckpointingPolicy.SAVE_ATTENTION and in_parts:
        message = "this attention is many small operators: no one result of it could be kept"
        yield Conflict((key, "model.attn_implementation", "model.sdpa_backend"), message, "a fused kernel, or full")

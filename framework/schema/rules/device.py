"""What leaves the device, and settings of its allocator."""

from collections.abc import Iterator

from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict

EMPTYING_COSTS_BELOW = 10
"""Steps between two emptyings from which they cost no time that shows (docs/evidence/speed.md: 1B on an H100,
2026-11)."""


def cache_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Steps between two emptyings, and settings of an allocator that is not there."""
    steps, key = config.training.empty_device_cache_steps, "training.empty_device_cache_steps"
    if steps is not None:
        message = "returns only blocks that nothing uses: the allocated peak stays as it is"
        if config.gpu.name == "cpu":
            message = "the cpu has no cache of blocks: nothing is returned"
        elif steps < EMPTYING_COSTS_BELOW:
            message += "; every step costs 2.8 % of speed, every tenth nothing that shows (1B, H100, 2026-11)"
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
    """What a base that comes from the host block by block cannot be beside."""
    training, key = config.training, "model.offload_frozen_base"
    if config.model.offload_frozen_base is not True:
        return
    if not training.use_peft:
        message = "only frozen weights can stay on the host, and here the weights are trained"
        yield Conflict(
            (key, "training.use_peft"), message, "training.use_peft=true, or training.optimizer_offload=host"
        )
    if training.use_peft and config.peft.q_lora:
        message = "packed weights are not streamed: their scales are no part of them"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: false, or q_lora alone, a quarter of the size")
    if training.compile is True:
        message = "a compiled block does not see its weights come and go"
        yield Conflict((key, "training.compile"), message, "training.compile: false")
    if config.fsdp.enable_fsdp is True:
        yield Conflict((key, "fsdp.enable_fsdp"), "sharded weights are not streamed", "fsdp.cpu_offload=true")
    if training.activation_offload is True:
        message = "views of streamed weights would be offloaded with the activations"
        yield Conflict((key, "training.activation_offload"), message, "training.enable_gradient_checkpointing=true")
    if config.gpu.name == "cpu":
        message = "on the cpu saves nothing: two blocks are held twice in the same memory"
        yield Conflict((key, "gpu.name"), message, "false", is_warning=True)
    is_cast = training.mixed_precision_dtype in (MixedPrecision.BF16, MixedPrecision.FP16)
    if is_cast and config.model.torch_dtype_str == TorchDtype.FLOAT32 and not training.enable_gradient_checkpointing:
        message = "autocast's half-precision copies of every block stay on the device until backward"
        nearest = "model.torch_dtype_str=bfloat16, or training.enable_gradient_checkpointing=true"
        yield Conflict((key, "model.torch_dtype_str"), message, nearest, is_warning=True)

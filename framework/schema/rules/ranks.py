"""What several ranks that train one model go with, and what they do not."""

from collections.abc import Iterator

from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


def ranks_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Levers that do not work next to a larger `gpu.count`, or next to some of what it is for."""
    training, count = config.training, "gpu.count"
    if config.gpu.count == 1:
        return
    if training.on_oom is OnOutOfMemory.SHRINK and (config.fsdp.is_sharded or config.sharing > 1):
        by = "fsdp.enable_fsdp" if config.fsdp.is_sharded else "model.attn_implementation"
        by = "fsdp.tensor_parallel_size" if config.fsdp.tensor_parallel_size > 1 else by
        message = "ranks exchange parts in every layer, and wait there for one that runs out of memory: all stop"
        yield Conflict(("training.on_oom", by), message, "training.on_oom: stop")
    if training.optimizer_in_backward is True:
        message = "the ranks' gradients are added up when backward is done, and would be used up before"
        yield Conflict(("training.optimizer_in_backward", count), message, "optimizer_in_backward: false")
    if config.model.offload_frozen_base is True:
        message = "each rank would keep a copy of the base in host memory"
        yield Conflict(("model.offload_frozen_base", count), message, "offload_frozen_base: false")
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    if training.enable_gradient_checkpointing is True and reentrant:
        keys = ("training.gradient_checkpointing_kwargs.use_reentrant", count)
        message = "re-entrant checkpoints end a gradient twice where the ranks' gradients are added up"
        yield Conflict(keys, message, "use_reentrant: false")

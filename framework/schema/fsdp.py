"""`fsdp`: sharding, context parallel and tensor parallel over several GPUs."""

from typing import Annotated

from framework.schema.choices import BackwardPrefetch, ShardingStrategy, StateDictType
from framework.schema.facts import UsedWith
from framework.schema.params import Auto, Params
from framework.schema.training import Positive

_SHARDED = UsedWith("fsdp.enable_fsdp")


class FSDPParams(Params):
    """Fully sharded data parallelism, if `enable_fsdp` is true; context and tensor parallel sizes."""

    enable_fsdp: bool | Auto = False
    """Shard weights, gradients and optimizer states over the devices."""
    sharding_strategy: Annotated[ShardingStrategy | Auto, _SHARDED] = ShardingStrategy.FULL_SHARD
    """What is split. `SHARD_GRAD_OP` keeps the weights gathered between forward and backward: faster, larger."""
    cpu_offload: Annotated[bool | Auto, _SHARDED] = False
    """Keep shards in pinned host memory. Costs host memory and link time."""
    forward_prefetch: Annotated[bool, _SHARDED] = False
    """Gather the next block while this one computes. Holds one more gathered block."""
    backward_prefetch: Annotated[BackwardPrefetch, _SHARDED] = BackwardPrefetch.BACKWARD_PRE
    """When the next block is gathered in backward. `BACKWARD_PRE` holds one more gathered block than `NONE`."""
    state_dict_type: Annotated[StateDictType, _SHARDED] = StateDictType.SHARDED_STATE_DICT
    """Format of checkpoints. `FULL_STATE_DICT` gathers the whole model in rank 0's host memory."""
    transformer_layer_cls: Annotated[str | None, _SHARDED] = None
    """Class of the blocks that are units of sharding. Unset: inferred and printed."""
    context_parallel_size: Positive | None = None
    """Number of devices that share each row with `model.attn_implementation: ring_attention`: activations are divided
    by it, and keys and values of the full row are gathered in each layer. Unset: all devices. Does not need
    `enable_fsdp`."""
    tensor_parallel_size: Positive = 1
    """Number of devices that share each large matrix of a block, following transformers' tensor-parallel plan of the
    model: weights, gradients, states and the activations in between are divided by it; each block has two blocking
    all-reduces in each pass. These devices take the same rows. Does not need `enable_fsdp`."""

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded; with `NO_SHARD` each device holds all."""
        return self.enable_fsdp is True and self.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def is_on_host(self) -> bool:
        """Whether shards stay in host memory; `cpu_offload` has no effect without shards."""
        return self.is_sharded and self.cpu_offload is True

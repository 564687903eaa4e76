"""`fsdp`: one model over several GPUs."""

from typing import Annotated

from framework.schema.choices import BackwardPrefetch, ShardingStrategy, StateDictType
from framework.schema.facts import UsedWith
from framework.schema.params import Auto, Params
from framework.schema.training import Positive

_SHARDED = UsedWith("fsdp.enable_fsdp")


class FSDPParams(Params):
    """Fully sharded data parallelism. In effect when `enable_fsdp` is true."""

    enable_fsdp: bool | Auto = False
    """Split weights, gradients and optimizer states over the devices."""
    sharding_strategy: Annotated[ShardingStrategy | Auto, _SHARDED] = ShardingStrategy.FULL_SHARD
    """What is split. `SHARD_GRAD_OP` keeps the weights gathered between forward and backward: faster, larger."""
    cpu_offload: Annotated[bool | Auto, _SHARDED] = False
    """Keep shards in pinned host memory. Costs host memory and link time."""
    forward_prefetch: Annotated[bool, _SHARDED] = False
    """Gather the next block while this one computes. Holds one more gathered block."""
    backward_prefetch: Annotated[BackwardPrefetch, _SHARDED] = BackwardPrefetch.BACKWARD_PRE
    """When the next block is gathered in backward. `BACKWARD_PRE` holds one more gathered block than `NONE`."""
    state_dict_type: Annotated[StateDictType, _SHARDED] = StateDictType.SHARDED_STATE_DICT
    """How checkpoints are written. `FULL_STATE_DICT` gathers the whole model in host memory of rank 0."""
    transformer_layer_cls: Annotated[str | None, _SHARDED] = None
    """Class of the blocks that are sharded one by one. Unset: inferred and printed."""
    context_parallel_size: Positive | None = None
    """Devices that share each row with `model.attn_implementation: ring_attention`: activations shrink as many times,
    keys and values of all its tokens are gathered in each layer. Unset: all devices. Does not need `enable_fsdp`."""
    tensor_parallel_size: Positive = 1
    """Devices that share each large matrix of a block, as transformers' plan of the model says: weights, gradients,
    states and what is kept between the two matrices shrink as many times; two sums over these devices a block in each
    pass are waited for. They take the same rows. Does not need `enable_fsdp`."""

    @property
    def is_sharded(self) -> bool:
        """Whether each device holds a part of the weights; with `NO_SHARD` each holds all."""
        return self.enable_fsdp is True and self.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def is_on_host(self) -> bool:
        """Whether each device's part stays in host memory: `cpu_offload` has no effect where nothing is split."""
        return self.is_sharded and self.cpu_offload is True

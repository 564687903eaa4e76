"""FSDP2: sharding of weights, gradients and optimizer states by torch's `fully_shard`.

Each transformer block is one unit, whose weights are gathered right before it runs and freed right after. If they are
not tied, the embedding is a unit, and the last norm and the head are another, which stays gathered until their
backward. All other parameters (tied embeddings, a task's head) are in the root unit, which is gathered from the start
of forward to the end of backward. Gradients are summed over the ranks, as the loss is a sum over the global batch.
Every micro-batch reduces at once, because unreduced gradients would be as large as the whole model on every card.
"""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from framework.build.adapters.quantize import is_quantized, is_quantized_weight
from framework.build.hub import nearest
from framework.build.levers.compiled import compiled_regions
from framework.build.levers.offload import pinning
from framework.build.loading.sharded import ShardLoader
from framework.build.model.parts import causal_model, ends_of, transformer_blocks
from framework.build.place import Place, autocast_dtype
from framework.build.ranks import Ranks
from framework.errors import Problem, RequestError
from framework.schema.choices import BackwardPrefetch, ShardingStrategy
from framework.schema.config import TrainingConfig
from framework.schema.fsdp import FSDPParams

if TYPE_CHECKING:
    from framework.build.parallel.tensor_parallel import TensorParallel

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)
STAYS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
"""Strategies that keep a block's weights gathered from its forward to its backward."""


@dataclass(frozen=True)
class Sharding:
    """The sharded model. `blocks` in execution order; the root holds all parameters outside of them and of the
    `ends`."""

    root: FSDPModule
    blocks: tuple[FSDPModule, ...]
    ends: tuple[tuple[FSDPModule, ...], ...]
    """Modules of the units before and after the blocks: the embedding; last norm and head."""
    block_class: str
    """Name of the class of the blocks."""
    shards: int
    """Ranks over which each weight is split."""
    replicas: int
    """Number of groups with the same shards."""

    @property
    def units(self) -> tuple[FSDPModule, ...]:
        """Units of gathering and reduction."""
        return (*self.blocks, *(end[0] for end in self.ends), self.root)

    def __str__(self) -> str:
        blocks = f"{len(self.blocks)} {self.block_class} and the rest"
        return f"{blocks} are gathered one by one, each split over {self.shards} devices"

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)` with the weights that it needs gathered."""
        result = self.root(function, *arguments)  # type: ignore[operator]
        for end in self.ends:
            # torch does this when all modules of a unit have run, but a chunked loss never calls the head
            unit = end[0]
            unit._get_fsdp_state()._modules_to_run_forward.clear()
            for group in parameter_groups(unit):
                group._training_state = TrainingState.IDLE
        return result

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Every micro-batch's gradients are reduced at once."""
        return contextlib.nullcontext()

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """dtype of gathered weights if it differs from their own, as torch reports it."""
        dtype: torch.dtype | None = parameter_groups(self.blocks[0])[0].mp_policy.param_dtype
        return dtype

    def free_gathered(self) -> None:
        """Free weights that are still gathered, for example after passes without backward."""
        for unit in self.units:
            unit.reshard()


def refuse_unsharded(config: TrainingConfig, root: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The blocks that become units. Raises RequestError if this model cannot be sharded as requested."""
    blocks = sharded_blocks(config.fsdp, model)
    _refuse_mixed_units(root, blocks, precision(config).param_dtype)
    # A graph cannot contain the gathering of weights.
    for region in compiled_regions(model):
        within = set(region.module.modules()) - {region.module}
        if not within.isdisjoint(blocks):
            whole = type(region.module).__name__
            message = f"training.compile makes one graph of each {whole}, which contains {type(blocks[0]).__name__}"
            raise RequestError([Problem("fsdp.transformer_layer_cls", message, expected=f"{whole}, or leave it unset")])
    return blocks


def shard(
    config: TrainingConfig,
    root: nn.Module,
    model: nn.Module,
    place: Place,
    ranks: Ranks,
    shard_loader: ShardLoader | None = None,
    tensor: "TensorParallel | None" = None,
) -> Sharding:
    """Shard the parameters below `root` over the ranks, in place; with hybrid strategies over those of one machine.

    `shard_loader` fills each unit right before it is sharded, and `tensor` cuts each matrix to its part, which is
    sharded over the ranks with the same part.

    `model` is the transformers model (or its adapter's wrapper) below `root`. Call it last: checkpoints and compiled
    regions are inside of units. Raises RequestError, before any weight is loaded, for blocks that are not found, that
    are inside a compiled region, that have trained weights of several dtypes, or quantized weights gathered with other
    dtypes.
    """
    params, strategy = config.fsdp, ShardingStrategy(config.fsdp.sharding_strategy)
    blocks = refuse_unsharded(config, root, model)
    block_class = type(blocks[0]).__name__  # sharding changes the class
    shards = ranks.local_world if strategy in HYBRID else ranks.world // ranks.same_rows
    replicas = ranks.world // ranks.same_rows // shards
    offloads = params.cpu_offload is True and not place.rehearsed  # a rehearsal's fake ranks handle it
    settings: dict[str, Any] = {
        "mesh": _mesh(place, replicas, shards) if tensor is None else tensor.peers(),
        "reshard_after_forward": strategy not in STAYS_GATHERED,
        "mp_policy": precision(config),
        "offload_policy": CPUOffloadPolicy(place.kind == "cuda") if offloads else OffloadPolicy(),
    }
    has_quantized = is_quantized(root)
    size = sum(item.numel() * item.element_size() for item in root.parameters()) // shards
    ends = ends_of(model, blocks)
    for unit in (*([block] for block in blocks), *ends, [root]):
        for module in unit:
            if shard_loader is not None:
                shard_loader.fill(module)
            if tensor is not None:
                tensor.cut(module)
        is_last = unit[-1] is root or (ends and unit is ends[-1])  # its backward follows its forward directly
        with pinning(size):
            fully_shard(unit, **settings | ({"reshard_after_forward": False} if is_last else {}))
    if shard_loader is not None:
        shard_loader.close()
    parts: Any = tuple(blocks), tuple(map(tuple, ends))
    sharding = Sharding(cast(FSDPModule, root), parts[0], parts[1], block_class, shards, replicas)
    if has_quantized:
        _finish_quantized(sharding)
    for sharded in sharding.units:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a division by 1 would exist only with NCCL
    _arrange_prefetch(params, sharding.blocks)
    return sharding


def _finish_quantized(sharding: Sharding) -> None:
    """Finish the sharding of quantized weights; on one rank nothing is gathered."""
    from framework.build.parallel.quantized_shards import (  # bitsandbytes takes seconds to import
        gather_as_bytes,
        mark_parts,
    )

    mark_parts(cast(nn.Module, sharding.root))
    if sharding.shards > 1:
        groups = (group for unit in sharding.units for group in parameter_groups(unit))
        gather_as_bytes(record for group in groups for record in group.fsdp_params)


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """torch's parameter groups of a unit: a list since torch 2.12, a single one before."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def sharded_blocks(params: FSDPParams, model: nn.Module) -> list[nn.Module]:
    """The modules that become units: of the named class, else the transformer blocks.

    Raises RequestError if there are none.
    """
    key, name = "fsdp.transformer_layer_cls", params.transformer_layer_cls
    repeated: list[nn.Module] = list(transformer_blocks(model))
    inferred = sorted({type(block).__name__ for block in repeated})
    if name is None:
        if not repeated:
            message = f"{type(causal_model(model)).__name__} has no known transformer blocks"
            raise RequestError([Problem(key, message, expected="the class of its repeated blocks")])
        return repeated
    modules = list(causal_model(model).modules())
    found = [module for module in modules if type(module).__name__ == name]
    if not found:
        classes = {type(module).__name__ for module in modules}
        message = f"the model has no {name}"
        raise RequestError([Problem(key, message, expected=", ".join(inferred), nearest=nearest(name, classes))])
    return found


def precision(config: TrainingConfig) -> MixedPrecisionPolicy:
    """FSDP's mixed precision: shards keep the weights' dtype, and are gathered and computed with in the lower one.

    It replaces autocast, which would gather float32 and cast every weight on every card. Gradients are summed in
    float32. Activations between blocks are in the lower dtype, where autocast has float32.
    """
    lower = autocast_dtype(config.training)
    return MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32) if lower else MixedPrecisionPolicy()


def _mesh(place: Place, replicas: int, shards: int) -> DeviceMesh:
    with torch._C.DisableTorchFunction():  # the mesh needs real values in a rehearsal too
        if replicas > 1:
            return init_device_mesh(place.kind, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(place.kind, (shards,), mesh_dim_names=("shard",))


def _refuse_mixed_units(root: nn.Module, blocks: list[nn.Module], lower: torch.dtype | None) -> None:
    """Raise RequestError for units with mixed dtypes. Gradients of a unit are reduced in one buffer, so they need one
    dtype. So do weights if some are quantized: they are gathered in `lower`, or unchanged, and a cast would corrupt
    quantized bytes."""
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    units = [(type(block).__name__, list(block.parameters())) for block in blocks]
    units.append(("the root unit", [item for item in root.parameters() if item not in in_blocks]))
    problems: dict[str, Problem] = {}
    for name, parameters in units:
        dtypes = _names({item.dtype for item in parameters if item.requires_grad})
        if len(dtypes) > 1:
            message = f"{name} has trained weights of {' and '.join(dtypes)}, which cannot be sharded together"
            problems[message] = Problem("model.torch_dtype_str", message, expected="one dtype")
        stored = {item.dtype for item in parameters if is_quantized_weight(item)}
        gathered = {item.dtype if is_quantized_weight(item) else lower or item.dtype for item in parameters}
        if stored and gathered | stored != {lower or next(iter(stored))}:
            message = f"{name} stores quantized bytes as {' and '.join(_names(stored))} and would be gathered in "
            message += " and ".join(_names(gathered | ({lower} if lower else set())))
            works = "training.mixed_precision_dtype: bf16, or one dtype of weights and adapter"
            problems[message] = Problem("peft.adapter_dtype", message, expected=works)
    if problems:
        raise RequestError(list(problems.values()))


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _arrange_prefetch(params: FSDPParams, blocks: tuple[FSDPModule, ...]) -> None:
    """Set up the prefetching of blocks in forward and backward.

    Without `forward_prefetch` forward gathers a block when the host reaches it, on a card while earlier ones compute.
    FSDP2's default in backward is BACKWARD_PRE.
    """
    if params.forward_prefetch:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    backward = BackwardPrefetch(params.backward_prefetch)
    if backward is BackwardPrefetch.BACKWARD_PRE:
        return
    for previous, block in zip((None, *blocks), blocks, strict=False):
        block.set_modules_to_backward_prefetch([block])  # the block itself, which is already gathered, so no other
        if backward is BackwardPrefetch.BACKWARD_POST and previous is not None:
            _gather_when_done(block, previous)


def _gather_when_done(block: FSDPModule, previous: FSDPModule) -> None:
    """Gather `previous` when the gradients of `block` are computed and before they are reduced."""

    def gather(gradient: Tensor) -> None:
        previous.unshard(async_op=True)

    def watch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        first = next((item for item in inputs if isinstance(item, Tensor) and item.requires_grad), None)
        if first is not None and torch._C._current_graph_task_id() == -1:
            first.register_hook(gather)  # type: ignore[no-untyped-call]

    cast(nn.Module, block).register_forward_pre_hook(watch)

"""The composition root: builds model, adapter, objective and optimizer of a config, for runs and rehearsals alike."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from framework.build.adapters.quantize import Factors, quantize, require_bitsandbytes
from framework.build.attention.context import Context, share_rows
from framework.build.attention.ring_attention import in_parts
from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.levers.activations import arrange_blocks
from framework.build.levers.allocator import DeviceCache
from framework.build.levers.compiled import compile_regions
from framework.build.levers.float8 import convert_products
from framework.build.levers.liger import use_liger_kernels
from framework.build.levers.streamed_base import StreamedBase, loading_place
from framework.build.loading.model import build_model
from framework.build.loading.sharded import ShardLoader, await_weights
from framework.build.losses.loss import Batch, Observe
from framework.build.model.embedding_noise import add_embedding_noise
from framework.build.model.experts import ExpertLoad, watch_experts
from framework.build.model.freeze import Frozen, fingerprint, freeze
from framework.build.optimizers.build import build_optimizer
from framework.build.parallel.gradient_buckets import GradientBuckets
from framework.build.parallel.parallelize import parallelize
from framework.build.place import Place, autocast_dtype
from framework.build.ranks import ALONE, Parallel, Ranks
from framework.build.scaler import LossScale, build_loss_scale
from framework.build.schedule import Schedule, build_schedule
from framework.build.tasks import build_frozen_model, build_objective
from framework.build.tasks.objective import Objective
from framework.build.tasks.reference import FirstAdapter
from framework.schema.choices import SdpaBackend
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:
    from framework.build.adapters.adapter import Adapter
    from framework.build.parallel.fsdp import Sharding
    from framework.build.parallel.tensor_parallel import TensorParallel

SDPA_BACKENDS = {
    SdpaBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaBackend.MATH: SDPBackend.MATH,
}


@dataclass(frozen=True)
class Assembly:
    """Everything one optimizer step needs, built from a resolved config."""

    config: TrainingConfig
    place: Place
    model: nn.Module
    frozen: tuple[Frozen, ...]
    objective: Objective
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loss_scale: LossScale
    cache: DeviceCache
    export_dtype: torch.dtype
    """dtype of the final export: that of the checkpoint, else of the weights."""
    adapter: "Adapter | None" = None
    streamed: StreamedBase | None = None
    frozen_model: nn.Module | None = None
    """The reference model of a preference, or a teacher. For a preference that continues an adapter, only a frozen copy
    of that adapter."""
    drawn: str | None = None
    """Fingerprint of a randomly initialized base under an adapter, since another device or version of torch draws other
    weights from the same seed. None for a base with files, or one drawn in shards."""
    new_weights: tuple[str, ...] = ()
    """Names of the head's weights that are missing from the checkpoint, so that they start random."""
    ranks: Ranks = ALONE
    parallel: Parallel | None = None
    """Wrapper through which several ranks train. `model` is the module inside, whose parameters have their plain
    names."""
    context: Context | None = None
    """The context-parallel group of this rank."""
    tensor: "TensorParallel | None" = None
    """The tensor-parallel group of this rank."""
    from_python: FromPython = TASKS_OWN
    experts: ExpertLoad | None = None
    """Counts of the tokens that each expert of a mixture of experts was given."""

    def loss_of(self, batch: Batch, observe: Observe) -> Tensor:
        """Sum of the losses of the batch's terms, a float32 scalar, through whatever wraps the model."""
        loss: Tensor = self.through(self.objective, batch, observe)
        return loss

    def sums_of(self, batch: Batch) -> Mapping[str, Tensor]:
        """Sums of the objective's metrics over this rank's batch, for an evaluation."""
        sums: Mapping[str, Tensor] = self.through(self.objective.sums, batch)
        return sums

    def through(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)`; on several ranks, called within the forward pass of the wrapper."""
        if self.parallel is None:
            return function(self.model, *arguments)
        return self.parallel(function, *arguments)

    def keeping_gradients(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward: gradients are reduced over the ranks only in the last
        one."""
        return contextlib.nullcontext() if self.parallel is None or is_last else self.parallel.no_sync()

    def drop_gradients(self) -> None:
        """Reset all gradients. Under DDP their memory is kept, since they are views of its buckets."""
        self.optimizer.zero_grad(set_to_none=not self.config.is_replicated)

    def part_of(self, batch: Batch) -> Batch:
        """The rank's share of a batch: all of it, or under context parallel its part of each row."""
        return batch if self.context is None else self.context.cut(batch)

    @property
    def sharding(self) -> "Sharding | None":
        """The FSDP wrapper; None where each rank holds all weights."""
        return cast("Sharding", self.parallel) if self.parallel and self.config.fsdp.is_sharded else None

    @property
    def buckets(self) -> GradientBuckets | None:
        """Gradient buckets that are reduced after backward; None where DDP or FSDP reduces."""
        return self.parallel if isinstance(self.parallel, GradientBuckets) else None

    @property
    def is_in_parts(self) -> bool:
        """Whether weights are split over the ranks, so that all ranks take part in saving and exporting."""
        return self.sharding is not None or self.tensor is not None

    def as_part(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter of `model`, or an optimizer state of its shape, marked as a tensor-parallel part that `whole`
        gathers."""
        return tensor if self.tensor is None else self.tensor.as_part(name, tensor)

    def numel(self, name: str, parameter: Tensor) -> int:
        """Number of elements of the full parameter, of which this rank may hold a part."""
        return parameter.numel() if self.tensor is None else self.tensor.numel(name, parameter)

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters, collected once: walking a model with adapters twice a step took the host 5 ms of 70
        (H200, 2026-11-29)."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Context of forward and loss. Sharded weights are gathered in the lower dtype instead."""
        dtype = autocast_dtype(self.config.training)
        if dtype is None or self.config.fsdp.is_sharded:
            return contextlib.nullcontext()
        return torch.autocast(self.place.kind, dtype=dtype)

    @property
    def attention(self) -> contextlib.AbstractContextManager[Any]:
        """Context of forward and backward (which recomputes checkpoints) that selects sdpa's kernel, or ring
        attention."""
        if self.context is not None:
            return in_parts(self.context)
        chosen = self.config.model.sdpa_backend
        return contextlib.nullcontext() if chosen is None else sdpa_kernel(SDPA_BACKENDS[SdpaBackend(chosen)])


def assemble(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    place: Place,
    total_steps: int,
    ranks: Ranks = ALONE,
    from_python: FromPython = TASKS_OWN,
) -> Assembly:
    """Build model, adapter, loss, optimizer and schedule of a resolved config on `place`.

    `total_steps` is the number of optimizer steps of the whole run. `from_python` may replace objective and optimizer.
    Raises RequestError for mistakes that only the built model shows: names that match nothing, weights that do not
    load.
    """
    if config.training.tf32 is not None and not place.rehearsed:
        # A setting of the process; unset is torch's default ("highest"). Only this function keeps the older and the
        # newer switches of torch 2.11 to 2.13 consistent.
        torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    context, (tensor, ranks) = share_rows(config, ranks), _sharing_matrices(config, place, ranks)
    base = _load_base(config, architecture, place, ranks)
    frozen = freeze(config.model, base.model)
    adapter = _adapted(config, base)
    model: nn.Module = base.model if adapter is None else adapter.model
    frozen_model = FirstAdapter(model) if config.has_first_adapter else base.frozen_model
    add_embedding_noise(config.training.neftune_noise_alpha, model)
    convert_products(config.training, model)
    arrange_blocks(config.training, model, place)
    streamed = StreamedBase(model, place) if config.model.offload_frozen_base is True else None
    objective = from_python.made_objective(build_objective(config, model, frozen_model))
    compile_regions(config, model, place)
    parallel = parallelize(config, model, place, ranks, base.shard_loader, tensor)
    return Assembly(
        config=config,
        place=place,
        model=model,
        frozen=frozen,
        objective=objective,
        optimizer=build_optimizer(config, model, place, from_python),
        schedule=build_schedule(config.training, total_steps),
        loss_scale=build_loss_scale(config.training, place),
        cache=DeviceCache(place, config.training.empty_device_cache_steps),
        export_dtype=base.export_dtype,
        adapter=adapter,
        streamed=streamed,
        frozen_model=frozen_model,
        ranks=ranks,
        parallel=parallel,
        drawn=base.drawn,
        new_weights=base.new_weights,
        context=context,
        tensor=tensor,
        from_python=from_python,
        experts=watch_experts(config, model, place),
    )


class _Base(NamedTuple):
    """The model as built or loaded, before anything is frozen or attached; fields as in `Assembly`."""

    model: PreTrainedModel
    place: Place
    """The host, if the model moves to the device later."""
    shard_loader: ShardLoader | None
    """Loader of a sharded model's weights."""
    export_dtype: torch.dtype
    new_weights: tuple[str, ...]
    drawn: str | None
    frozen_model: nn.Module | None
    lost: Factors
    """Quantization errors, which initialize LoftQ's factors."""


def _load_base(config: TrainingConfig, architecture: PretrainedConfig, place: Place, ranks: Ranks) -> _Base:
    stated = architecture.dtype  # building writes the training dtype over it
    computed, quantized = autocast_dtype(config.training), config.training.use_peft and config.peft.q_lora
    if quantized:
        require_bitsandbytes("peft.q_lora", "false (LoRA on a base in bfloat16)")
    shard_loader = await_weights(config, architecture, place, ranks)
    if shard_loader is not None:
        model, new_weights, loaded_at = shard_loader.model, shard_loader.new, shard_loader.place
    else:
        loaded_at = loading_place(place) if config.model.offload_frozen_base is True else place
        model, new_weights = build_model(config, architecture, loaded_at, computed)
    is_drawn = config.training.use_peft and not config.model.load_pretrained_weights
    has_values = shard_loader is None and not place.rehearsed
    drawn = f"{fingerprint(model.parameters()):016x}" if is_drawn and has_values else None
    export_dtype = getattr(torch, stated) if isinstance(stated, str) else stated or model.dtype
    frozen_model = build_frozen_model(config, model, place, computed)
    lost: Factors = {}
    if quantized:
        computed = computed or model.dtype
        lost = quantize(config.peft, model, computed, loaded_at)
        if config.fsdp.is_sharded and max(ranks.world, config.gpu.count if place.rehearsed else 1) > 1:
            from framework.build.parallel.quantized_shards import store_as  # bitsandbytes takes seconds to import

            store_as(computed, model)  # in which its units are gathered
    if shard_loader is not None:
        shard_loader.learn_names()
    use_liger_kernels(config.model, model)
    if frozen_model is not None and config.training.has_reference:
        use_liger_kernels(config.model, frozen_model)  # of the same kind
    return _Base(model, loaded_at, shard_loader, export_dtype, new_weights, drawn, frozen_model, lost)


def _adapted(config: TrainingConfig, base: _Base) -> "Adapter | None":
    if not config.training.use_peft:
        return None
    from framework.build.adapters.without_bitsandbytes import without_bitsandbytes

    with contextlib.nullcontext() if config.peft.q_lora else without_bitsandbytes():
        from framework.build.adapters.adapter import attach_adapter  # peft takes seconds to import

        masters, seed = autocast_dtype(config.training) is not None, config.training.seed
        return attach_adapter(config.peft, base.model, base.place, masters=masters, lost=base.lost, seed=seed)


def _sharing_matrices(config: TrainingConfig, place: Place, ranks: Ranks) -> "tuple[TensorParallel | None, Ranks]":
    """The tensor-parallel group, and `ranks` with the size of the groups that take the same rows."""
    if config.fsdp.tensor_parallel_size == 1:
        return None, ranks
    # torch's tensors in parts take seconds to import
    from framework.build.parallel.tensor_parallel import share_matrices

    tensor = share_matrices(config, place, ranks)
    return tensor, replace(ranks, same_rows=tensor.size, others=tensor.others)

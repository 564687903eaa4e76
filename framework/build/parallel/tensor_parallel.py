"""Tensor parallelism: ranks that take the same rows, and of each large matrix of a block a part.

transformers ships, with a model's config, the plan of it (`base_model_tp_plan`): a `colwise` matrix is cut by its
outputs, the `rowwise` one behind it by its inputs. Between the two each rank computes whole attention heads, or a part
of the inner features, without the others; what the second gives is a part of a sum, which is added up over the ranks.
So a block adds up twice in forward, and in backward twice what goes back to its inputs. All else (embedding, norms,
head) every rank has whole and computes from the same numbers.

Weights are plain tensors of the part's size, not torch's DTensors: checkpoints, losses in chunks, adapters, DDP,
`fully_shard` and the rehearsal see a model with fewer heads. Only what is saved is told which part it is.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from transformers import PretrainedConfig

from framework.build.model.parts import causal_model, ends_of, transformer_blocks
from framework.build.place import Place
from framework.build.ranks import Ranks, local_part, whole
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.build.loading.sharded import ShardLoader

KEY = "fsdp.tensor_parallel_size"
BY_OUTPUTS, BY_INPUTS, SEES_A_PART = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""transformers' styles (integrations/tensor_parallel.py): split in dimension 0, in dimension 1, not split. A replicated
module that sees only some heads, such as the norm of queries, has a partial gradient on each rank."""
_DIMENSIONS = {BY_OUTPUTS: 0, BY_INPUTS: 1}
_STAYS_WHOLE = "embedding_rowwise"
"""A tied embedding would need another split than the plan has for the head, so both stay replicated."""
_WHOLE = "embedding and head are replicated"
_INSTEAD = "1; fsdp.enable_fsdp=true splits the weights over the devices in another way"


@dataclass
class TensorParallel:
    """This rank's place in a tensor-parallel group of `size` ranks.

    `dimensions`: name of a split parameter -> its split dimension; `partial`: names of replicated parameters with
    partial gradients.
    """

    rank: int
    size: int
    mesh: DeviceMesh | None = None
    """Mesh of all ranks, `("tensor", "data")`, or one-dimensional for a single group."""
    group: Any = None
    """Process group of the ranks that share each matrix."""
    others: Any = None
    """Process group of the ranks with the same parts and other rows; None without any."""
    dimensions: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    """Full length of each split parameter in its split dimension."""
    partial: set[str] = field(default_factory=set)
    _waiting: dict[nn.Module, dict[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        split = counted(len(self.dimensions), "tensor is", "tensors are")
        return f"{split} in {self.size} parts, one on each device of a group; {_WHOLE}"

    def numel(self, name: str, parameter: Tensor) -> int:
        """Number of elements of the full parameter."""
        return parameter.numel() * (self.size if name in self.dimensions else 1)

    def arrange(self, model: nn.Module) -> None:
        """Determine the parameters to split, and install the blocks' collectives.

        Call it after the adapter is attached. Raises RequestError for a module that cannot be split, or that the plan
        does not mention.
        """
        names = {module: name for name, module in model.named_modules()}
        planned = _planned(causal_model(model), _plan(causal_model(model).config.get_text_config()))
        if not planned:
            message = f"transformers' plan names no module of {type(causal_model(model)).__name__}"
            raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
        for parent, children in planned.items():
            if not {*_DIMENSIONS} <= {*children.values()}:
                name = type(parent).__name__
                message = f"transformers' plan splits {name} only by inputs or only by outputs, which is not supported"
                raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
            # Siblings of planned modules see only some heads or features, so the plan has to mention them.
            inside = {parameter for child in children for parameter in child.parameters()}
            for own, parameter in parent.named_parameters():
                if parameter not in inside:
                    message = f"transformers' plan does not mention {names[parent]}.{own}, which would see only a part"
                    raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
            parent.register_forward_pre_hook(_entering(self.group), with_kwargs=True)
            for child, style in children.items():
                self._find(names, child, style)
                if style == BY_INPUTS:
                    _add_up_outputs(child, self.group)

    def _find(self, names: Mapping[nn.Module, str], child: nn.Module, style: str) -> None:
        """Record the split parameters of a planned module, and those with partial gradients."""
        dimension = _DIMENSIONS.get(style)
        if dimension is None:
            self.partial |= {f"{names[child]}.{name}" for name, _ in child.named_parameters()}
            return
        linear, first, second = _matrices(child)
        if not isinstance(linear, nn.Linear):
            message = f"{names[child]} is a {type(linear).__name__}, which cannot be split"
            raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
        replicated, cut = (first, second) if dimension == 0 else (second, first)
        due = [(module, "weight") for module in (linear, cut) if module is not None]
        due += [(linear, "bias")] if dimension == 0 and linear.bias is not None else []
        for module, name in due:
            size = module.get_parameter(name).shape[dimension]
            if size % self.size:
                side = "inputs" if dimension else "outputs"
                message = f"the {size} {side} of {names[child]} are not {self.size} equal parts"
                raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
            self.dimensions[f"{names[module]}.{name}"] = dimension
            self.lengths[f"{names[module]}.{name}"] = size
            self._waiting.setdefault(module, {})[name] = dimension
        if replicated is not None:
            self.partial.add(f"{names[replicated]}.weight")

    def cut(self, unit: nn.Module) -> None:
        """Cut the parameters below `unit` to this rank's part, if not done yet."""
        for module in unit.modules():
            for name, dimension in self._waiting.pop(module, {}).items():
                parameter = module._parameters[name]
                assert parameter is not None
                part = parameter.detach().chunk(self.size, dimension)[self.rank]
                part = part.clone(memory_format=torch.contiguous_format)
                module._parameters[name] = nn.Parameter(part, parameter.requires_grad)

    def peers(self) -> DeviceMesh:
        """Mesh of the ranks with the same parts, over which these can be sharded further."""
        assert self.mesh is not None
        return self.mesh["data"]

    def cut_all(self, model: nn.Module, root: nn.Module, shard_loader: "ShardLoader | None") -> None:
        """Fill and cut a model that is not sharded, block by block. `root` contains the model."""
        blocks = list(transformer_blocks(model))
        for unit in (*blocks, *itertools.chain(*ends_of(model, blocks)), root):
            if shard_loader is not None:
                shard_loader.fill(unit)
            self.cut(unit)
        if shard_loader is not None:
            shard_loader.close()

    def as_part(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or a state of its shape, as a DTensor over the same memory, for `whole` to gather."""
        dimension = self.dimensions.get(name)
        if dimension is None:
            return tensor
        assert self.mesh is not None
        mesh, placements, shape = self.mesh["tensor"], list[Placement]([Shard(dimension)]), list(tensor.shape)
        if isinstance(tensor, DTensor):  # an FSDP shard of the part
            mesh, placements = self.mesh, [Shard(dimension), *tensor.placements]
        shape[dimension] *= self.size
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local_part(tensor), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def complete_gradients(self, model: nn.Module) -> None:
        """All-reduce the partial gradients over the group, in one call."""
        parameters = dict(model.named_parameters())
        gradients = [grad for name in sorted(self.partial) if (grad := parameters[name].grad) is not None]
        if not gradients:
            return
        parts = list(map(local_part, gradients))
        together = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(together, group=self.group)
        for part, added in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
            part.copy_(added.view_as(part))

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Norm of all gradients, including split matrices: a float32 scalar."""
        named = [(name, item.grad) for name, item in model.named_parameters() if item.grad is not None]
        kinds = [[grad for name, grad in named if (name in self.dimensions) is is_cut] for is_cut in (True, False)]
        zero = torch.zeros((), device=local_part(named[0][1]).device)
        norms = [whole(torch.nn.utils.get_total_norm(grads)).float() if grads else zero for grads in kinds]
        squares = norms[0] ** 2
        dist.all_reduce(squares, group=self.group)
        return (squares + norms[1] ** 2).sqrt()


def share_matrices(config: TrainingConfig, place: Place, ranks: Ranks) -> TensorParallel:
    """The tensor-parallel group of this rank. Every rank must call this.

    Groups are neighbors: ranks 0 to n - 1 are the first, which take the same rows, and so on.
    """
    size = config.fsdp.tensor_parallel_size
    if ranks.world == 1:  # `check` needs only shapes
        return TensorParallel(0, size)
    groups, names = ranks.world // size, ("tensor", "data")
    with torch._C.DisableTorchFunction():  # the mesh needs real values in a rehearsal too
        numbers = torch.arange(ranks.world, device="cpu").view(groups, size).T
        if groups == 1:  # one dimension uses the group of all ranks, without another communicator
            mesh = DeviceMesh(place.kind, numbers.squeeze(1), mesh_dim_names=names[:1])
            return TensorParallel(ranks.rank, size, mesh, mesh.get_group())
        mesh = DeviceMesh(place.kind, numbers, mesh_dim_names=names)
        group, others = mesh["tensor"].get_group(), mesh["data"].get_group()
    return TensorParallel(ranks.rank % size, size, mesh, group, others)


def refuse_unplanned(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError, before any weight is loaded, for a model without a supported plan in transformers, or with
    heads or features that do not divide evenly."""
    size = config.fsdp.tensor_parallel_size
    settings, kind = architecture.get_text_config(), architecture.model_type
    plan = _plan(settings)
    if not plan:
        message = f"transformers has no tensor-parallel plan for {kind}"
        raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
    strange = sorted({*plan.values()} - {*_DIMENSIONS, SEES_A_PART})
    if strange:
        message = f"transformers' plan for {kind} has {', '.join(strange)}, which is not supported"
        raise RequestError([Problem(KEY, message, expected=_INSTEAD)])
    heads = settings.num_attention_heads
    named = {"attention heads": heads, "key and value heads": getattr(settings, "num_key_value_heads", None) or heads}
    named["inner features"] = getattr(settings, "intermediate_size", None)
    counts = {name: count for name, count in named.items() if isinstance(count, int)}
    uneven = [f"{count:,} {name}" for name, count in counts.items() if count % size]
    if uneven:
        limit = config.gpu.count
        works = [n for n in range(1, limit + 1) if not any(count % n for count in (*counts.values(), limit))]
        message = f"{' and '.join(uneven)} of {kind} are not {size} equal parts"
        raise RequestError([Problem(KEY, message, expected=", ".join(map(str, works)))])


def _plan(settings: PretrainedConfig) -> dict[str, str]:
    """transformers' tensor-parallel plan of a model's blocks."""
    plan = getattr(settings, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if style != _STAYS_WHOLE}


def _planned(model: nn.Module, plan: Mapping[str, str]) -> dict[nn.Module, dict[nn.Module, str]]:
    """Parent module -> its planned children and their styles."""
    base: nn.Module = getattr(model, "base_model", model)
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    for name, module in base.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), None)
        if style is not None:
            found.setdefault(base.get_submodule(name.rpartition(".")[0]), {})[module] = style
    return found


def _matrices(module: nn.Module) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """The linear layer, and LoRA's matrices of its inputs and outputs."""
    if not hasattr(module, "lora_A"):
        return module, None, None
    adapted: Any = module
    return adapted.get_base_layer(), adapted.lora_A["default"], adapted.lora_B["default"]


# -- collectives of a block
class _Enter(torch.autograd.Function):
    """Entry into split layers: identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """Exit of split layers: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _added(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _added(part: Tensor, group: Any) -> Tensor:
    """All-reduce into a new tensor: a checkpoint may keep the part, and autograd's gradients must not be modified."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _entering(group: Any) -> Any:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered = {name: _entered(value, group) for name, value in kwargs.items()}
        return tuple(_entered(value, group) for value in args), entered

    return enter


def _entered(value: Any, group: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        entered: Tensor = _Enter.apply(value, group)  # type: ignore[no-untyped-call]
        return entered
    return value


def _add_up_outputs(module: nn.Module, group: Any) -> None:
    """All-reduce the outputs of a module. The bias is replicated, so it is added after the sum."""
    linear: Any = _matrices(module)[0]
    linear.forward = lambda given: torch.nn.functional.linear(given, linear.weight)

    def leave(module: nn.Module, args: tuple[Any, ...], part: Tensor) -> Tensor:
        total: Tensor = _Leave.apply(part, group)  # type: ignore[no-untyped-call]
        return total if linear.bias is None else total + linear.bias.to(total.dtype)

    module.register_forward_hook(leave)

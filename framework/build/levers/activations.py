"""Activation checkpointing and offload: how transformer blocks run and are recomputed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from framework.build.levers.offload import Offload
from framework.build.model.parts import causal_model, transformer_blocks
from framework.build.place import Place
from framework.errors import Problem, RequestError
from framework.schema.choices import CheckpointingPolicy
from framework.schema.training import TrainingParams

PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")
"""Operators of linear layers, including quantized ones and experts; not `bmm`, which computes attention scores."""


@dataclass(frozen=True)
class Recompute:
    """Runs a block so that backward recomputes it from its inputs and the results that `policy` keeps.

    `trains`: whether the block has trained weights. A block that needs no gradient keeps nothing anyway.
    """

    policy: CheckpointingPolicy
    reentrant: bool
    trains: bool

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(*inputs)`; transformers binds the block and its keywords to `function`."""
        given = (*inputs, *getattr(function, "keywords", {}).values())
        if not (self.trains or any(isinstance(item, Tensor) and item.requires_grad for item in given)):
            return function(*inputs)
        if self.reentrant:
            return checkpoint(function, *_asking_for_gradients(inputs), use_reentrant=True)
        if self.policy is CheckpointingPolicy.FULL:
            return checkpoint(function, *inputs, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, partial(_keep_or_recompute, self.policy))
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


def _asking_for_gradients(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make an input require gradients, without which the re-entrant checkpoint gives weights none
    (torch.utils.checkpoint)."""
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        return inputs
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if first is None:
        return inputs
    return tuple(first.detach().requires_grad_() if item is first else item for item in inputs)


@cache
def keeps(policy: CheckpointingPolicy, operator: str) -> bool:
    """Whether a checkpointed block keeps the results of an operator, named `mm` or `aten::mm`."""
    if policy is CheckpointingPolicy.FULL:
        return False
    if "attention" in operator or "flash_attn" in operator:
        return True
    return policy is CheckpointingPolicy.SAVE_MATMULS and operator.rpartition("::")[2].partition(".")[0] in PRODUCTS


def _keep_or_recompute(policy: CheckpointingPolicy, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    return CheckpointPolicy.MUST_SAVE if keeps(policy, operator.name()) else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Offloaded:
    """Runs a block through `inner` and offloads the tensors that it keeps."""

    offload: Offload
    inner: Recompute | None
    is_last: bool

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """`function(*inputs)`; transformers binds the block and its keywords to `function`."""
        with self.offload.block(function, self.is_last):
            return function(*inputs) if self.inner is None else self.inner(function, *inputs)


def arrange_blocks(training: TrainingParams, model: nn.Module, place: Place) -> None:
    """Set up checkpointing of every n-th block, and offloading of kept tensors, as requested.

    Call it when the trained weights are determined. Raises RequestError for a model without such blocks.
    """
    recomputes, offloads = training.enable_gradient_checkpointing is True, training.activation_offload is True
    if not (recomputes or offloads):
        return
    blocks = transformer_blocks(model)
    if not blocks:
        key = "training.enable_gradient_checkpointing" if recomputes else "training.activation_offload"
        message = f"{type(causal_model(model)).__name__} has no known transformer blocks"
        raise RequestError([Problem(key, message, expected="false")])
    offload = Offload(place) if offloads else None
    every = int(training.gradient_checkpointing_every) if recomputes else 0
    policy = CheckpointingPolicy(training.gradient_checkpointing_policy)
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    for index, block in enumerate(blocks):
        trains = any(parameter.requires_grad for parameter in block.parameters())
        inner = Recompute(policy, reentrant, trains) if every and index % every == 0 else None
        runner = Offloaded(offload, inner, block is blocks[-1]) if offload is not None else inner
        if runner is not None:
            block.gradient_checkpointing = True  # makes transformers call the function below
            block._gradient_checkpointing_func = runner


def recomputing(model: nn.Module) -> Iterator[tuple[GradientCheckpointingLayer, Recompute]]:
    """The checkpointed blocks in train mode, with their runners."""
    for block, runner in _runners(model):
        inner = runner.inner if isinstance(runner, Offloaded) else runner
        if isinstance(inner, Recompute):
            yield block, inner


def offloading(model: nn.Module) -> list[Offload]:
    """The offloads of blocks in train mode."""
    return [runner.offload for _, runner in _runners(model) if isinstance(runner, Offloaded)]


def _runners(model: nn.Module) -> Iterator[tuple[GradientCheckpointingLayer, Any]]:
    for block in transformer_blocks(model):
        if block.gradient_checkpointing and block.training:
            yield block, getattr(block, "_gradient_checkpointing_func", None)

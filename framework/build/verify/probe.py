"""What really runs when a few tokens go forward as in training: attention kernels, and what the blocks keep."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.build.assembly import Assembly
from framework.build.attention.flex_attention import NAME as FLEX_ATTENTION
from framework.build.data.batches import full_batch
from framework.build.hub import one_line
from framework.build.levers.compiled import plain_code
from framework.build.losses.loss import Batch, model_inputs
from framework.build.model.parts import transformer_blocks

PROBE_TOKENS = 16


@dataclass
class Seen:
    """`operators` that ran, with how often; of the blocks, by their place: which asked for gradients of their output,
    so that they keep activations, and which went through the function that checkpoints them."""

    operators: Counter[str] = field(default_factory=Counter)
    keeping: set[int] = field(default_factory=set)
    checkpointed: set[int] = field(default_factory=set)
    failure: str | None = None
    """Why the forward pass did not come to its end: no kernel could serve it."""


def probe(assembly: Assembly) -> Seen:
    """Run a few tokens forward, without backward and without compiled code."""
    device, length = assembly.place.device, assembly.config.model.model_max_length
    tokens = min(PROBE_TOKENS, length) if isinstance(length, int) else PROBE_TOKENS
    tokens = assembly.config.padded(tokens) if assembly.context is not None else tokens
    rows = 2 if assembly.config.training.task.is_of_rows else 1  # of which one is padded, as it will be
    batch = full_batch(assembly.config, torch.zeros((rows, tokens), dtype=torch.int64, device=device))
    devices = [device] if assembly.place.kind == "cuda" else []
    seen = Seen()
    is_flex = assembly.config.model.attn_implementation == FLEX_ATTENTION
    uncompiled = _flex_uncompiled() if is_flex else nullcontext()
    with torch.random.fork_rng(devices), uncompiled, plain_code(assembly.model), _watched(assembly.model, seen):
        try:
            # No backward follows. DDP must be told, or it reduces the next one, in the middle of the first step.
            alone = assembly.keeping_gradients(is_last=False)
            with assembly.attention, assembly.autocast, alone, Operators(seen):
                assembly.through(_forward, assembly.part_of(batch))
        except RuntimeError as error:  # "No available kernel. Aborting execution."
            if "kernel" not in str(error).lower():
                raise
            seen.failure = one_line(error)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()  # no backward follows
    return seen


@contextmanager
def _flex_uncompiled() -> Iterator[None]:
    """Within the block flex_attention is one operator that can be seen, of which torch warns for its speed."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        yield


def _forward(model: nn.Module, batch: Batch) -> None:
    model(**model_inputs(model, batch), use_cache=False)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    supports_higher_order_operators = True

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._seen.operators[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Within the block, note what each transformer block does."""
    blocks = transformer_blocks(model)
    runners = {index: block._gradient_checkpointing_func for index, block in enumerate(blocks) if _has_runner(block)}
    handles = [block.register_forward_hook(_output_noted(index, seen)) for index, block in enumerate(blocks)]
    for index, runner in runners.items():
        blocks[index]._gradient_checkpointing_func = _call_noted(index, runner, seen)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for index, runner in runners.items():
            blocks[index]._gradient_checkpointing_func = runner


def _has_runner(block: nn.Module) -> bool:
    return hasattr(block, "_gradient_checkpointing_func")


def _call_noted(index: int, runner: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        seen.checkpointed.add(index)
        output = runner(function, *inputs)
        _note_output(index, seen, output)  # hooks of the block may run in a re-entrant checkpoint, without gradients
        return output

    return run


def _output_noted(index: int, seen: Seen) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, inputs, output: _note_output(index, seen, output)


def _note_output(index: int, seen: Seen, output: Any) -> None:
    parts = output if isinstance(output, tuple) else (output,)
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        seen.keeping.add(index)

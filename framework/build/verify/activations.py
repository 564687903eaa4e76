"""Readers of running blocks: recomputation, attention, Liger's kernels and compiled regions, observed in a forward pass
of a few tokens."""

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
from framework.build.attention.ring_attention import NAME as RING_ATTENTION
from framework.build.data.batches import full_batch
from framework.build.hub import one_line
from framework.build.levers.activations import keeps, offloading, recomputing
from framework.build.levers.compiled import SKIPPED, WHOLE, compiled_regions, modules_to_compile, plain_code
from framework.build.levers.liger import KEY, liger_kernels
from framework.build.levers.offload import LEAST_BYTES
from framework.build.losses.loss import Batch, model_inputs
from framework.build.model.convolutions import CONVOLUTIONAL
from framework.build.model.parts import causal_model, transformer_blocks
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import CheckpointingPolicy, CompileScope
from framework.schema.plural import counted


def read_checkpointed_blocks(assembly: Assembly) -> Iterator[Reading]:
    """The recomputed blocks: requested, in train mode, and observed to call their checkpoint."""
    training, blocks = assembly.config.training, transformer_blocks(assembly.model)
    key, every = "training.enable_gradient_checkpointing", int(training.gradient_checkpointing_every)
    asks = training.enable_gradient_checkpointing is True
    done = {id(block): runner for block, runner in recomputing(assembly.model)}
    if not asks:
        yield Reading(key, f"0/{len(blocks)}", f"{len(done)}/{len(blocks)}", "blocks in train mode")
        return
    seen = probe(assembly)
    ran = [block for index, block in enumerate(blocks) if id(block) in done and index in seen.checkpointed]
    source = seen.failure or f"blocks in train mode, {PROBE_TOKENS} tokens forward"
    yield Reading(key, f"{len(blocks[::every])}/{len(blocks)}", f"{len(ran)}/{len(blocks)}", source)
    policy = CheckpointingPolicy(training.gradient_checkpointing_policy)
    found = {str(runner.policy) for runner in done.values()}
    if policy is not CheckpointingPolicy.FULL and not any(keeps(policy, operator) for operator in seen.operators):
        found = {"nothing to keep: no operator of this policy ran"}
    yield Reading("training.gradient_checkpointing_policy", str(policy), ", ".join(sorted(found)), source)


def read_keeping_blocks(assembly: Assembly) -> Iterator[Reading]:
    """Number of blocks that keep activations for backward: none of those before the first trained weight."""
    if all(parameter.requires_grad for parameter in assembly.model.parameters()):
        return
    blocks, seen = transformer_blocks(assembly.model), probe(assembly)
    if blocks and seen.failure is None:
        found, source = f"{len(seen.keeping)}/{len(blocks)}", f"requires_grad of their outputs, {PROBE_TOKENS} tokens"
        yield Reading("blocks that keep activations", None, found, source)


def read_offloaded_activations(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The blocks that offload activations to the host, and the bytes offloaded up to the end of the first step."""
    asks, blocks = assembly.config.training.activation_offload is True, transformer_blocks(assembly.model)
    offloads = offloading(assembly.model)
    moved = sum(offload.moved_bytes for offload in set(offloads))
    source = f"{moved / 2**20:,.1f} MiB moved in the first step"
    if asks and not moved:
        source += f": no tensor of a block has {LEAST_BYTES / 2**20:g} MiB"
    asked, found = (f"{count}/{counted(len(blocks), 'block')}" for count in (len(blocks) if asks else 0, len(offloads)))
    if asks or offloads:
        yield Reading("training.activation_offload", asked, found, source)


_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_safe_softmax": "math",
}
"""The operator that identifies each kernel of scaled_dot_product_attention."""


def read_sdpa_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that ran for `sdpa`, or for parts of rows, in a forward pass of a few tokens as in training."""
    asked = assembly.config.model.sdpa_backend
    if causal_model(assembly.model).config._attn_implementation not in ("sdpa", RING_ATTENTION):
        if asked is not None:
            yield Reading("model.sdpa_backend", str(asked), "none: this model does not use sdpa", "model.config")
        return
    seen = probe(assembly)
    names = {operator.rpartition("::")[2].partition(".")[0] for operator in seen.operators}
    found = f"none ({seen.failure})" if seen.failure else ", ".join(sorted({_KERNELS[n] for n in names & {*_KERNELS}}))
    source = f"operators of {PROBE_TOKENS} tokens forward"
    yield Reading("model.sdpa_backend", str(asked) if asked else None, found or "none", source)


def read_attention_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel selected by the model's own config; for information if none was requested."""
    config = causal_model(assembly.model).config
    found = "none: convolutions" if type(config) in CONVOLUTIONAL else config._attn_implementation
    asked = assembly.config.model.attn_implementation
    yield Reading("model.attn_implementation", str(asked) if asked else None, str(found), "model.config")


def read_liger_kernels(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks with one of Liger's kernels; also read if not requested, to detect a patch of the entire process."""
    blocks = transformer_blocks(assembly.model) or [assembly.model]
    with_kernels = sum(bool(liger_kernels(block)) for block in blocks)
    asked = len(blocks) if assembly.config.model.enable_liger_kernel is True else 0
    if not asked and not with_kernels:
        return
    kernels = sorted(liger_kernels(assembly.model).items())
    source = ", ".join(f"{count} {name}" for name, count in kernels) or "no forward is Liger's"
    yield Reading(
        KEY, f"{asked}/{counted(len(blocks), 'block')}", f"{with_kernels}/{counted(len(blocks), 'block')}", source
    )


_COMPILE = "training.compile"


def read_compiled_regions(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks (or the model) with a compiled call; none if not requested."""
    config, regions = assembly.config, compiled_regions(assembly.model)
    if config.training.compile is not True:
        yield Reading(_COMPILE, "0", str(len(regions)), "compiled calls of modules")
        return
    wanted = [name for name, _ in modules_to_compile(config, assembly.model)]
    count = f"{len(wanted)}/{len(wanted)}"
    yield Reading(_COMPILE, count, f"{len(regions)}/{len(wanted)}", "compiled calls of modules")
    names = [region.name for region in regions]
    scope = CompileScope.MODEL if names == [WHOLE] else CompileScope.BLOCK
    source = f"{names[0]} to {names[-1]}" if len(names) > 1 else ", ".join(names)
    yield Reading("training.compile_scope", str(config.training.compile_scope), str(scope), source)


def read_compiled_runs(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """n/n regions that ran compiled code in every pass of the first step; torch falls back to eager code silently."""
    regions = compiled_regions(assembly.model)
    if not regions:
        return
    ran = sum(0 < region.calls == region.compiled_calls for region in regions)
    counters, compiler = torch._dynamo.utils.counters, regions[0].compiler
    breaks = sum(counters["graph_break"].values())
    frames = f"{counters['frames']['ok']} of {counted(counters['frames']['total'], 'frame')}"
    source = f"{counted(compiler.graphs, 'graph')} from {frames} in {compiler.seconds:.1f} s"
    source += f", {counted(breaks, 'graph break')}"
    yield Reading(_COMPILE, f"{len(regions)}/{len(regions)}", f"{ran}/{len(regions)}", source)


def read_recorded_graphs(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether torch will record every graph; it skips graphs that it cannot replay, without an error."""
    regions = compiled_regions(assembly.model)
    if not assembly.config.training.cuda_graphs or not regions:
        return
    from torch._inductor.cudagraph_trees import get_manager  # seconds to import

    skipped = torch._dynamo.utils.counters["inductor"][SKIPPED]
    is_ready = get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None
    source = f"torch's manager of graphs, {counted(skipped, 'graph')} that it leaves out"
    yield Reading("training.cuda_graphs", "true", str(is_ready and not skipped).lower(), source)


def read_memory_budget(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The budget in effect when each graph was partitioned into kept and recomputed activations."""
    asked, regions = assembly.config.training.activation_memory_budget, compiled_regions(assembly.model)
    if not regions:
        return
    found = ", ".join(f"{budget:g}" for budget in sorted(set(regions[0].compiler.budgets)))
    requested = f"{asked:g}" if isinstance(asked, float | int) else None
    yield Reading("training.activation_memory_budget", requested, found, "torch._functorch.config during compilation")


PROBE_TOKENS = 16


@dataclass
class Seen:
    """Counts of the `operators` that ran; positions of the blocks whose outputs require gradients, so that they keep
    activations, and of those that called their checkpoint function."""

    operators: Counter[str] = field(default_factory=Counter)
    keeping: set[int] = field(default_factory=set)
    checkpointed: set[int] = field(default_factory=set)
    failure: str | None = None
    """The error of the forward pass if no kernel supported it."""


def probe(assembly: Assembly) -> Seen:
    """Run a forward pass of a few tokens, without backward and without compiled code."""
    device, length = assembly.place.device, assembly.config.model.model_max_length
    tokens = min(PROBE_TOKENS, length) if isinstance(length, int) else PROBE_TOKENS
    tokens = assembly.config.padded(tokens) if assembly.context is not None else tokens
    rows = 2 if assembly.config.training.task.facts.is_of_rows else 1  # of which one is padded, as it will be
    batch = full_batch(assembly.config, torch.zeros((rows, tokens), dtype=torch.int64, device=device))
    devices = [device] if assembly.place.kind == "cuda" else []
    seen = Seen()
    is_flex = assembly.config.model.attn_implementation == FLEX_ATTENTION
    uncompiled = _flex_uncompiled() if is_flex else nullcontext()
    with torch.random.fork_rng(devices), uncompiled, plain_code(assembly.model), _watched(assembly.model, seen):
        try:
            # No backward follows. Otherwise DDP would reduce during the next backward, in the middle of the first step.
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
    """Context in which flex_attention is one visible operator, for whose speed torch warns."""
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
    """Context that records the behaviour of each transformer block."""
    blocks = transformer_blocks(model)
    runners = {
        index: block._gradient_checkpointing_func
        for index, block in enumerate(blocks)
        if hasattr(block, "_gradient_checkpointing_func")
    }
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


def _call_noted(index: int, runner: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        seen.checkpointed.add(index)
        output = runner(function, *inputs)
        _note_output(index, seen, output)  # the block's hooks may run in a re-entrant checkpoint, without gradients
        return output

    return run


def _output_noted(index: int, seen: Seen) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, inputs, output: _note_output(index, seen, output)


def _note_output(index: int, seen: Seen, output: Any) -> None:
    parts = output if isinstance(output, tuple) else (output,)
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        seen.keeping.add(index)

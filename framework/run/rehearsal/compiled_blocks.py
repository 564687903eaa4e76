"""Rehearsal of compiled blocks with torch's own capture, passes and partitioner, on tensors without storage.

Dynamo and code generation are skipped: AOTAutograd captures a block, and its runtime saves the same tensors between
forward and backward as in a real run, through the same hooks, so that checkpointing and offloading work unchanged. One
capture serves all equal blocks. Only a plan of a compiled run imports this module.

Private names of torch used here (tests/run/rehearsal/test_compiled_blocks.py holds a block's saved bytes to a measured
run):
`aot_function`, `min_cut_rematerialization_partition`, `joint_graph_passes`, `select_decomp_table`,
`aot_autograd.preserve_rng_state`, `pattern_matcher.fallback_node_due_to_unsupported_type`, `V.set_fake_mode`, the stack
of function modes.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._functorch import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import pattern_matcher
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from framework.build.adapters.quantize import Packing, scales_of, with_scales
from framework.build.assembly import Assembly
from framework.build.hub import one_line
from framework.build.levers.compiled import WHOLE, Region, compiled_regions
from framework.errors import RequestError
from framework.run.rehearsal.block_settings import block_settings
from framework.run.rehearsal.compiled_graph import GraphReplay
from framework.run.rehearsal.fake_device import FakeDeviceMode
from framework.run.rehearsal.tracker import Tracker
from framework.schema.choices import CompileScope

PLANNED = (
    "compiled blocks keep the tensors that torch's partitioner saves for backward; the first step also times kernels, "
    "unless torch's compile cache has them"
)
RECORDED = "CUDA graphs are planned like the kernels that they record: allocated may be 0.8 % less (360M, H200)"
BY_BLOCK = "the model is compiled as a whole but planned block by block: allocated may be 2.5 % too low (1B, H200)"


@dataclass
class CompiledBlocks:
    """The compiled calls of a rehearsal. `notes` tells how they were planned, for the plan's assumptions.

    With `by_block` a region that covers the whole model is planned as its blocks, because checkpoints within a graph
    are not captured, or the graph could not be.
    """

    mode: FakeDeviceMode
    budget: float | None
    tracker: Tracker
    captures: "dict[Any, Capture]" = field(default_factory=dict)
    failure: str | None = None
    by_block: bool = False
    records: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        if self.failure is not None:
            return (f"a block could not be captured ({self.failure}): planned as eager code, an upper bound",)
        return (PLANNED, *[BY_BLOCK] * self.by_block, *[RECORDED] * self.records)

    def call(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the captured call of a module, or its eager call if it could not be captured."""
        module, is_whole = region.module, region.name == WHOLE
        if self.failure is None and not self.mode.tracing and not (is_whole and self.by_block):
            flat, spec = tree_flatten((args, kwargs))
            key = _key(module, flat, spec)
            if key in self.captures or self._captured(key, region, flat, spec):
                capture = self.captures[key]
                capture.user = self
                return capture(module, flat)
            if is_whole:
                self.by_block, self.failure = True, None
        return region.plain(*args, **kwargs)

    def _captured(self, key: Any, region: Region, flat: list[Any], spec: TreeSpec) -> bool:
        """Capture a block if needed. Returns whether that worked; if not, all blocks are planned as eager code."""
        try:
            self.captures[key] = self._capture(region, flat, spec)
        except RequestError:
            raise
        except Exception as error:  # torch's tracer raises any kind of error
            self.failure = one_line(error, 120)
        return key in self.captures

    def _capture(self, region: Region, flat: list[Any], spec: TreeSpec) -> "Capture":
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        capture = Capture(region, flat, spec, modes, self)
        budget = 1.0 if self.budget is None else self.budget  # torch's default
        self.mode.tracing = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings(action="ignore"))  # the tracer's own warnings
                stack.enter_context(functorch_config.patch(activation_memory_budget=budget))
                stack.enter_context(_without_function_modes())
                stack.enter_context(_disable_current_modes())
                # a checkpoint around the block must not count tensors saved here
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
                # both would start CUDA
                stack.enter_context(mock.patch.object(aot_autograd, "preserve_rng_state", contextlib.nullcontext))
                stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=False))
                stack.enter_context(_autocast_cache(False))
                if region.name == WHOLE:  # a graph has no checks of values by transformers
                    stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", return_value=True))
                capture.run(region.module, flat)
        finally:
            self.mode.tracing = False
        return capture


class Capture:
    """One block's forward and backward graphs, and the mapping of its arguments to their inputs.

    `user` is the rehearsal that it runs in; a capture may outlive the one that created it (`Kept`).
    """

    def __init__(
        self,
        region: Region,
        flat: Sequence[Any],
        spec: TreeSpec,
        modes: Sequence[Any],
        user: CompiledBlocks,
    ) -> None:
        module, call = region.module, region.plain
        self.user = user
        self._tensors = [index for index, item in enumerate(flat) if isinstance(item, torch.Tensor)]
        # not the tensors, which would live as long as the capture
        others = [None if isinstance(item, torch.Tensor) else item for item in flat]
        self._spec: TreeSpec | None = None
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        quantized = dict(_quantized(module))

        def function(*inputs: torch.Tensor) -> list[Any]:
            leaves = list(others)
            for index, tensor in zip(self._tensors, inputs, strict=False):
                leaves[index] = tensor
            args, kwargs = tree_unflatten(leaves, spec)
            held = iter(inputs[len(self._tensors) :])
            state = dict(zip(names, held, strict=False))
            for name, original in quantized.items():
                state[name].quant_state = with_scales(original, held)  # type: ignore[attr-defined]
            with _function_modes(modes), torch.nn.utils.stateless._reparametrize_module(module, state):
                result = call(*args, **kwargs)
            flat_result, self._spec = tree_flatten(result)
            return flat_result

        def forward(gm: fx.GraphModule, example_inputs: Any) -> GraphReplay:
            return GraphReplay(gm, self._tracker, is_backward=False)

        def backward(gm: fx.GraphModule, example_inputs: Any) -> GraphReplay:
            return GraphReplay(gm, self._tracker, is_backward=True)

        self._compiled = aot_autograd.aot_function(
            function,
            forward,
            backward,
            partial(_cut, weights=range(len(self._tensors), len(self._tensors) + len(_held(module)))),
            select_decomp_table(),
            inference_compiler=forward,
            keep_inference_input_mutations=True,
        )

    def _tracker(self) -> Tracker | None:
        return self.user.tracker if self.user.mode.tracing is False else None

    def run(self, module: nn.Module, flat: Sequence[Any]) -> list[Any]:
        return list(self._compiled(*(flat[index] for index in self._tensors), *_held(module)))

    def __call__(self, module: nn.Module, flat: Sequence[Any]) -> Any:
        with _without_function_modes():
            result = self.run(module, flat)
        assert self._spec is not None
        return tree_unflatten(result, self._spec)


def _quantized(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, `quant_state`) of each 4-bit weight."""
    for name, weight in module.named_parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None and not isinstance(state, Packing):
            yield name, state


def _held(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a block has: parameters, buffers, scales of 4-bit weights."""
    scales = (scale for _, state in _quantized(module) for scale in scales_of(state))
    return [*module.parameters(), *module.buffers(), *scales]


Kept = dict[str, dict[Any, Capture]]
"""Captures of earlier rehearsals in this process, by their `block_settings`."""


def plan_compiled_blocks(assembly: Assembly, mode: FakeDeviceMode, tracker: Tracker, kept: Kept) -> CompiledBlocks:
    """Replace the compiled calls of an assembled rehearsal by replays of their graphs. Captures are reused from and
    added to `kept`."""
    training = assembly.config.training
    budget = training.activation_memory_budget
    blocks = CompiledBlocks(mode, budget if isinstance(budget, float | int) else None, tracker)
    blocks.captures = kept.setdefault(block_settings(assembly.config.model_dump(mode="json")), {})
    blocks.records = training.cuda_graphs
    regions = compiled_regions(assembly.model)
    if training.compile_scope is CompileScope.MODEL:
        blocks.by_block = training.enable_gradient_checkpointing is True or training.activation_offload is True
        [whole] = regions
        for name, module in assembly.model.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                region = Region(name, module, whole.compiler, module._call_impl)
                module._compiled_call_impl = region
                regions.append(region)
    for region in regions:
        region.compiled = _call_of(region, blocks)
    return blocks


def _call_of(region: Region, blocks: CompiledBlocks) -> Callable[..., Any]:
    return lambda *args, **kwargs: blocks.call(region, args, kwargs)


_NO_MATTER = ("layer_idx", "gradient_checkpointing")
"""Attributes that a block's compiled call does not read, since checkpoints are outside of it."""


def _key(module: nn.Module, flat: Sequence[Any], spec: TreeSpec) -> Any:
    """Cache key of a capture: shapes, kinds and settings of everything that the call sees."""
    tensors = [*(item for item in flat if isinstance(item, torch.Tensor)), *module.parameters(), *module.buffers()]
    facts = tuple((tuple(item.shape), item.stride(), item.dtype, item.requires_grad) for item in tensors)
    plain = (bool, int, float, str, type(None), torch.dtype)
    others = tuple(item if isinstance(item, plain) else type(item) for item in flat)
    settings = tuple(
        (name, value)
        for inner in module.modules()
        for name, value in vars(inner).items()
        if isinstance(value, plain) and name not in _NO_MATTER
    )
    regions = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
    return type(module), facts, others, settings, regions, str(spec)


def _cut(
    joint: fx.GraphModule, inputs: Any, *, weights: Sequence[int], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph as Inductor does (compile_fx.partition_fn), without constant folding, which needs values.

    `weights` are positions of inputs that stay alive anyway: saving one for backward costs nothing, so its cast (fp8)
    is recomputed rather than saved. Dynamo passes them to torch.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.nodes])
    # torch's patterns skip what reads tensors without storage
    no_exception = mock.patch.object(pattern_matcher, "fallback_node_due_to_unsupported_type", return_value=False)
    with inductor_config.patch(joint_graph_constant_folding=False), no_exception, V.set_fake_mode(fake_mode):
        joint_graph_passes(joint)
    options |= {"compiler": "inductor", "static_lifetime_input_indices": list(weights)}
    return min_cut_rematerialization_partition(joint, inputs, **options)


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    popped = []
    while torch._C._len_torch_function_stack():
        popped.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(popped):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def _function_modes(modes: Sequence[Any]) -> Iterator[None]:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()


@contextlib.contextmanager
def _autocast_cache(enabled: bool) -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

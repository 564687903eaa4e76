"""torch.compile of each transformer block, or of the whole model, with counters of compiled calls.

Only training passes run compiled code. Evaluation, samples and probes have many shapes and keep no activations, so they
run uncompiled. A checkpoint is always around a block's compiled code, never inside, so that the block's input is kept.
Parameter names do not change.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from framework.build.hub import one_line
from framework.build.model.parts import causal_model
from framework.build.place import Place
from framework.errors import Problem, RequestError, VerificationFailed
from framework.schema.choices import CompileScope, MixedPrecision
from framework.schema.config import MOST_STATIC_LENGTHS, TrainingConfig
from framework.schema.training import TrainingParams

Run = Callable[..., Any]
SKIPPED = "cudagraph_skips"
"""torch's counter of compiled graphs that it did not record as CUDA graphs."""
WHOLE = "the model below its head"
"""Name of the region of the whole model."""


class Compiler:
    """Backend of torch.compile: Inductor with a memory budget, which records graphs and their runs.

    `budgets` has the budget in force when each graph was partitioned into forward and backward. With `records` each
    graph's kernels are recorded when it runs for the second time, and replayed from then on.
    """

    def __init__(self, budget: float | None, records: bool) -> None:
        self._budget = budget
        self.records = records
        self.budgets: list[float] = []
        self.seconds = 0.0
        self.runs = 0

    @property
    def graphs(self) -> int:
        return len(self.budgets)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Run:
        from torch._functorch import config

        started = time.perf_counter()
        with config.patch(activation_memory_budget=self._budget) if self._budget else contextlib.nullcontext():
            self.budgets.append(float(config.activation_memory_budget))
            compiled = lower(graph, inputs, {"triton.cudagraphs": True}) if self.records else lower(graph, inputs)
        self.seconds += time.perf_counter() - started

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Run:
    """Compile as `backend="inductor"`, with options of its config."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs, config_patches=options)
    return cast(Run, compiled)


def forget_recorded(training: TrainingParams) -> None:
    """Allow CUDA graphs to overwrite outputs of the previous step: call it at the start of a step, after gradients were
    dropped. Micro-batches of a step are recorded in sequence, so that gradients can accumulate."""
    if training.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


CHECKPOINTS_IN_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)
"""Whether a block checkpoints inside its call, as since transformers 5.2x, instead of around it."""


class Region:
    """The call of a compiled module. A rehearsal replaces `compiled`.

    `plain` is the whole call, or for a sharded module only its forward, since hooks around it gather the weights.
    `calls` counts training passes, `compiled_calls` those that ran compiled code: torch silently falls back to plain
    code after too many shapes.
    """

    def __init__(self, name: str, module: nn.Module, compiler: Compiler, plain: Run) -> None:
        self.name = name
        self.module = module
        self.compiler = compiler
        self.plain = plain
        self.compiled = plain
        self.is_on = True
        self.calls = self.compiled_calls = 0
        self.is_reported = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if not (self.is_on and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        checkpoints = self.name != WHOLE and getattr(module, "gradient_checkpointing", False) and module.training
        if CHECKPOINTS_IN_FORWARD and checkpoints:
            return module._gradient_checkpointing_func(partial(self._run_without_checkpoint, **kwargs), *args)
        return self._run(*args, **kwargs)

    def _run_without_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        module.gradient_checkpointing = False
        try:
            return self._run(*args, **kwargs)
        finally:
            module.gradient_checkpointing = True

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        before = self.compiler.runs
        try:
            result = self.compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = error.inner_exception if isinstance(error, torch._dynamo.exc.BackendCompilerFailed) else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            message = f"training.compile: {self.name} does not compile: {one_line(cause)}"
            raise VerificationFailed(f"{message}; training.compile=false trains without") from error
        self.calls += 1
        self.compiled_calls += self.compiler.runs > before
        return result


def compile_regions(config: TrainingConfig, model: nn.Module, place: Place) -> None:
    """Compile the blocks, or the model below the head, if requested.

    Equal blocks share their code. Raises RequestError for a model class without blocks, and for layers that split
    compiled code under autocast.
    """
    if config.training.compile is not True:
        return
    _refuse_under_autocast(config, model)
    compiler = Compiler(_budget(config), config.training.cuda_graphs)
    is_static = 1 <= config.possible_lengths <= MOST_STATIC_LENGTHS
    if not place.rehearsed:
        torch._dynamo.utils.counters["inductor"][SKIPPED] = 0
        # Every run has its own compiler, and torch keeps eight compilations per function: drop those of earlier runs.
        torch._dynamo.reset()
        if is_static:
            limit = 4 * MOST_STATIC_LENGTHS  # full and shorter micro-batches, and two types of blocks
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for name, module in modules_to_compile(config, model):
        region = Region(name, module, compiler, _forward_of(module) if config.fsdp.is_sharded else module._call_impl)
        if not place.rehearsed:
            region.compiled = torch.compile(region.plain, backend=compiler, dynamic=False if is_static else None)
        if config.fsdp.is_sharded:
            module.forward = region
        else:
            module._compiled_call_impl = region


def _refuse_under_autocast(config: TrainingConfig, model: nn.Module) -> None:
    """Raise RequestError for layers that split compiled code under autocast.

    Float32 experts: their grouped product does not support it (many warnings, and 7 % less memory than planned; Qwen3
    MoE, H200, 2026-11). 8-bit layers with a bias: bitsandbytes (0.50) casts it in place to the dtype of the input, and
    a checkpoint's recomputation fails.
    """
    if config.training.mixed_precision_dtype in (None, MixedPrecision.NONE):
        return
    modules = [module for module in model.modules() if not isinstance(module, nn.Conv1d)]
    weights = (weight for module in modules for weight in module.parameters(recurse=False))
    message = None
    if any(weight.dim() == 3 and weight.dtype is torch.float32 for weight in weights):
        message = "float32 experts cannot be compiled under autocast, which their grouped product does not support"
    elif any(_is_8bit(module) and module.bias is not None for module in modules):
        message = "8-bit layers with a bias cannot be compiled under autocast: bitsandbytes casts the bias in place"
    if message is not None:
        works = "training.compile=false, or model.torch_dtype_str=bfloat16 with training.mixed_precision_dtype=none"
        raise RequestError([Problem("training.compile", message, expected=works)])


def _is_8bit(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) and weight is not None and weight.dtype is torch.int8


def _forward_of(module: nn.Module) -> Run:
    """The forward of the module's class before sharding changes it; transformers checkpoints inside."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return forward


def _budget(config: TrainingConfig) -> float | None:
    budget = config.training.activation_memory_budget
    return budget if isinstance(budget, float | int) else None


def modules_to_compile(config: TrainingConfig, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules for `compile_scope`: the blocks, or the model below its head.

    The head is left out because a chunked loss calls it separately, and adapters wrap the whole model in calls that
    break the graph.
    """
    if config.training.compile_scope is CompileScope.MODEL:
        return [(WHOLE, causal_model(model).base_model)]
    blocks = [
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not blocks:
        message = f"{type(causal_model(model)).__name__} has no known transformer blocks"
        raise RequestError([Problem("training.compile_scope", message, expected="model")])
    return blocks


def compiled_regions(model: nn.Module) -> list[Region]:
    """The compiled calls of a built model."""
    calls = (call for module in model.modules() for call in (module._compiled_call_impl, vars(module).get("forward")))
    return [call for call in calls if isinstance(call, Region)]


def newly_plain(model: nn.Module) -> list[str]:
    """A message for each region that has fallen back to plain code since the last call."""
    fallen = [item for item in compiled_regions(model) if item.compiled_calls < item.calls and not item.is_reported]
    for region in fallen:
        region.is_reported = True
    return [f"{item.name} ran plain code: torch did not compile for another batch shape" for item in fallen]


@contextlib.contextmanager
def plain_code(model: nn.Module) -> Iterator[None]:
    """Within the block models run uncompiled, so that a probe of a few tokens costs no compilation."""
    regions = compiled_regions(model)
    for region in regions:
        region.is_on = False
    try:
        yield
    finally:
        for region in regions:
            region.is_on = True

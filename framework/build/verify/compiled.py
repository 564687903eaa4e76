"""What is compiled, and whether compiled code ran."""

from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.levers.compiled import SKIPPED, WHOLE, compiled_regions, modules_to_compile
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import CompileScope
from framework.schema.plural import counted

_COMPILE = "training.compile"


def read_compiled_regions(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks (or the model) have a compiled call; none when it was not asked for."""
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
    """n/n regions ran compiled code in every pass of the first step; torch falls back to plain code silently."""
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
    """Whether torch is about to record every graph; it leaves out, without an error, what it cannot replay."""
    regions = compiled_regions(assembly.model)
    if not assembly.config.training.cuda_graphs or not regions:
        return
    from torch._inductor.cudagraph_trees import get_manager  # seconds to import

    skipped = torch._dynamo.utils.counters["inductor"][SKIPPED]
    is_ready = get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None
    source = f"torch's manager of graphs, {counted(skipped, 'graph')} that it leaves out"
    yield Reading("training.cuda_graphs", "true", str(is_ready and not skipped).lower(), source)


def read_memory_budget(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The budget in force while each graph was cut into what forward keeps and what backward computes again."""
    asked, regions = assembly.config.training.activation_memory_budget, compiled_regions(assembly.model)
    if not regions:
        return
    found = ", ".join(f"{budget:g}" for budget in sorted(set(regions[0].compiler.budgets)))
    said = f"{asked:g}" if isinstance(asked, float | int) else None
    yield Reading("training.activation_memory_budget", said, found, "torch._functorch.config during compilation")

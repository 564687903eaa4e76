"""Principal components of the adapted modules' inputs (`peft.lora_init: eva`): distinct inputs, and passes over rows.

Paischer et al. 2024, arXiv 2410.07170, with peft's incremental decomposition. Each module keeps its rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from framework.build.assembly import Assembly
from framework.build.losses.loss import Batch, Observe, model_inputs
from framework.build.model.parts import causal_model

MOST_BATCHES = 32
"""Micro-batches of training rows, used in turn."""
SETTLED = 0.99
"""Cosine similarity to its value before a pass from which a component has converged (`tau` of peft's EvaConfig)."""


@dataclass(eq=False)
class Input:
    """One tensor that is the input of some adapted modules, and its components so far."""

    matrices: dict[nn.Module, Tensor]
    """The modules with their A matrices, `[rank, width]`."""
    decomposition: Any
    is_settled: bool = False

    @property
    def rank(self) -> int:
        """Number of components: the highest rank of the modules."""
        return max(map(len, self.matrices.values()))

    @property
    def components(self) -> Tensor | None:
        """Orthonormal rows, float32 or float64 `[rank, width]`; None before a pass with as many tokens as the rank."""
        found: Tensor | None = getattr(self.decomposition, "components_", None)
        return found

    def add(self, states: Tensor) -> None:
        """Continue the decomposition with the input of some tokens, `[tokens, width]`."""
        before = self.components
        if len(states) < self.rank:
            return
        self.decomposition.partial_fit(states.float())
        if before is not None:
            self.is_settled = bool((torch.cosine_similarity(self.decomposition.components_, before) >= SETTLED).all())


def distinct_inputs(assembly: Assembly, batch: Batch) -> list[Input]:
    """The inputs of the modules of `matrices_from_rows` in a forward pass over `batch`, each tensor once."""
    from peft.utils.incremental_pca import IncrementalPCA

    from framework.build.adapters.first_adapter import matrices_from_rows  # both take seconds to import

    matrices = matrices_from_rows(assembly.model)
    seen, groups, noted = WeakTensorKeyDictionary(), list[dict[nn.Module, Tensor]](), set[nn.Module]()

    def note(module: nn.Module, tensor: Tensor) -> None:
        if module in noted:  # called twice
            return
        noted.add(module)
        if tensor not in seen:
            seen[tensor] = len(groups)
            groups.append({})
        groups[seen[tensor]][module] = matrices[module]

    _pass_over(assembly, batch, [(module, partial(note, module)) for module in matrices])
    made = []
    for group in groups:
        rank = max(map(len, group.values()))
        decomposition = IncrementalPCA(n_components=rank, copy=True, lowrank=True, lowrank_seed=42)  # as in peft
        made.append(Input(group, decomposition))
    return made


def components_pass(assembly: Assembly, batch: Batch, tokens: Tensor, inputs: list[Input]) -> None:
    """Run a forward pass over a micro-batch and update the components of those `inputs` that have not converged.

    `tokens` are positions in the flattened batch, int64 `[tokens]`. An input of other tokens is used whole.
    """

    def add(item: Input, tensor: Tensor) -> None:
        states = tensor.reshape(-1, tensor.shape[-1])
        item.add(states[tokens] if len(states) == batch["input_ids"].numel() else states)

    _pass_over(
        assembly, batch, [(next(iter(item.matrices)), partial(add, item)) for item in inputs if not item.is_settled]
    )


def components_step(assembly: Assembly, batch: Batch, observe: Observe) -> None:
    """Run the passes that need most memory: all tokens count, and the second pass continues all components."""
    tokens = torch.arange(batch["input_ids"].numel(), device=assembly.place.device)
    observe("start")
    inputs = distinct_inputs(assembly, batch)
    for _ in range(2):
        components_pass(assembly, batch, tokens, inputs)
    observe("end")


def _pass_over(assembly: Assembly, batch: Batch, watched: list[tuple[nn.Module, Any]]) -> None:
    """Run a forward pass in eval mode and without gradients, in which each watched module's function gets its input.

    They run outside autocast, where the decomposition's products would be half precision, which CUDA's QR does not
    support.
    """

    def watching(function: Any, module: nn.Module, given: tuple[Tensor, ...], output: Any) -> None:
        with torch.autocast(assembly.place.kind, enabled=False):
            function(given[0])

    with _hooked([module.register_forward_hook(partial(watching, function)) for module, function in watched]):
        assembly.model.eval()
        try:
            with torch.no_grad(), assembly.attention, assembly.autocast:
                inputs = model_inputs(assembly.model, batch)
                causal_model(assembly.model).base_model(**inputs, use_cache=False)
        finally:
            assembly.model.train()


@contextmanager
def _hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

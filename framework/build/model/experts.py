"""Mixtures of experts: the routers of a model, and the load of their experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from framework.build.model.parts import causal_model
from framework.build.place import Place
from framework.build.ranks import Ranks
from framework.schema.config import TrainingConfig

_NAMES = ("gate", "router")
"""transformers' names of a router, a sibling of `experts` (5.17 to 5.24)."""


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers, by their names in the model without an adapter."""
    modules = dict(causal_model(model).named_modules())
    return {
        name: module
        for name, module in modules.items()
        if name.rpartition(".")[2] in _NAMES and hasattr(modules[name.rpartition(".")[0]], "experts")
    }


def chosen_and_available(config: PretrainedConfig) -> tuple[int, int] | None:
    """Number of experts per token and of all experts in a layer; None without experts."""
    chosen: int | None = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    available = next((count for name in names if (count := getattr(config, name, None))), None)
    return (chosen, available) if chosen and available else None


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens routed to each expert since the last `forget`: int64 `[routers, experts]` on the device.

    Padding counts, and with checkpointing every token twice. Counting does not synchronize with the device.
    """

    counts: Tensor

    def forget(self) -> None:
        """Reset the counts."""
        self.counts.zero_()

    def busiest_share(self, ranks: Ranks) -> Tensor:
        """Share of tokens routed to the busiest expert, mean over the routers, over all ranks: a float64 scalar. It is
        1 / experts for an even load."""
        counts = ranks.sum(self.counts.double())
        share: Tensor = (counts.amax(1) / counts.sum(1).clamp(min=1)).mean()
        return share


def watch_experts(config: TrainingConfig, model: nn.Module, place: Place) -> ExpertLoad | None:
    """Count the tokens that a model's routers send to each expert in training; None without routers, and for compiled
    blocks, whose routers are not accessible."""
    found, numbers = routers(model), chosen_and_available(causal_model(model).config.get_text_config())
    if not found or numbers is None or config.training.compile is True:
        return None
    load = ExpertLoad(torch.zeros(len(found), numbers[1], dtype=torch.int64, device=place.device))
    for counts, module in zip(load.counts, found.values(), strict=True):
        module.register_forward_hook(partial(_count, counts, numbers[0]))
    return load


@torch.no_grad()
def _count(counts: Tensor, chosen: int, module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook that counts a router's choices: its indices of experts, `[tokens, chosen]`, or else from its
    logits."""
    if not module.training:
        return
    given = [item for item in (output if isinstance(output, tuple) else (output,)) if isinstance(item, Tensor)]
    numbers = next((item for item in given if item.dtype == torch.int64 and item.shape[-1:] == (chosen,)), None)
    if numbers is None:
        logits = next((item for item in reversed(given) if item.shape[-1] == len(counts)), None)
        if logits is None:
            return
        numbers = logits.topk(chosen, -1).indices
    flat = numbers.reshape(-1)
    counts.scatter_add_(0, flat, torch.ones_like(flat))

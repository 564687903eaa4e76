"""Freezing of parameters (`model.freeze_layers`, `freeze_router`, `freeze_first_blocks`), and fingerprints of
tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.build.model.experts import routers
from framework.build.model.parts import transformer_blocks
from framework.build.ranks import local_part
from framework.errors import Problem, RequestError
from framework.schema.model import ModelParams
from framework.schema.plural import counted

EMBEDDINGS = "embeddings"
"""The pattern for all embeddings, whatever their name."""


@dataclass(frozen=True)
class Frozen:
    """Parameters frozen by one pattern or option, by their names in the built model."""

    key: str
    pattern: str
    names: frozenset[str]
    parameters: int
    bytes: int
    shares_head: bool = False
    """Whether the head's weight is among them, because it is tied to an embedding."""

    def __str__(self) -> str:
        tied = ", the head among them" if self.shares_head else ""
        return f"frozen by {self.pattern}: {counted(self.parameters, 'parameter')}, {self.bytes / 2**20:,.1f} MiB{tied}"


def matches(pattern: str, name: str) -> bool:
    """Whether the dotted `pattern` matches consecutive segments of the dotted `name`.

    `layers.1` matches `model.layers.1.mlp.weight` and not `model.layers.10.mlp.weight`; each segment may be a glob.
    """
    wanted, given = pattern.split("."), name.split(".")
    starts = range(len(given) - len(wanted) + 1)
    return any(all(map(fnmatchcase, given[start:], wanted)) for start in starts)


def freeze(params: ModelParams, model: PreTrainedModel) -> tuple[Frozen, ...]:
    """Disable the gradients of all parameters that match a pattern, or belong to the routers or the first blocks.

    Raises RequestError for patterns without a match, for a model without routers, or if nothing is left to train.
    """
    found, problems = [], []
    if params.freeze_first_blocks:
        blocks, count = transformer_blocks(model), params.freeze_first_blocks
        if count > len(blocks):
            message = f"the model has {counted(len(blocks), 'block')}"
            problems.append(Problem("model.freeze_first_blocks", message, expected=f"at most {len(blocks)}"))
        inside = {id(parameter) for block in blocks[:count] for parameter in block.parameters()}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in inside]
        found.append(_freeze("model.freeze_first_blocks", f"first {counted(count, 'block')}", names, model))
    if params.freeze_router:
        parts = [(name, part) for name, module in routers(model).items() for part, _ in module.named_parameters()]
        if not parts:
            message = f"{model.config.model_type} has no routers"
            problems.append(Problem("model.freeze_router", message, expected="false"))
        found.append(_freeze("model.freeze_router", "the routers", [f"{name}.{part}" for name, part in parts], model))
    for index, pattern in enumerate(params.freeze_layers):
        key = f"model.freeze_layers[{index}]"
        names = [name for name, _ in model.named_parameters() if matches(pattern, name)]
        names += _embeddings(model) if pattern == EMBEDDINGS else []
        if not names:
            message, near = f"{pattern!r} matches no module of this model", nearest_modules(pattern, model)
            problems.append(Problem(key, message, nearest=near, expected="a module name"))
        found.append(_freeze(key, pattern, names, model))
    if found and not problems and not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append(Problem(found[0].key.partition("[")[0], "freezes every parameter: nothing is left to train"))
    if problems:
        raise RequestError(problems)
    return tuple(found)


def _freeze(key: str, pattern: str, names: Iterable[str], model: PreTrainedModel) -> Frozen:
    parameters = [model.get_parameter(name) for name in sorted(set(names))]
    for parameter in parameters:
        parameter.requires_grad_(False)
    head, embedding = (
        getattr(part, "weight", None) for part in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    shares = head is embedding and any(parameter is head for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return Frozen(key, pattern, frozenset(names), sum(parameter.numel() for parameter in parameters), size, shares)


def _embeddings(model: nn.Module) -> list[str]:
    return [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for part, _ in module.named_parameters(recurse=False)
    ]


def still_frozen(model: nn.Module, names: frozenset[str], numel: Callable[[str, Tensor], int]) -> int:
    """Number of elements of the parameters of these names that are frozen now, in the model or under its adapter;
    `numel` counts the full parameter, of which this rank may hold a part."""
    return sum(
        numel(name, parameter)
        for name, parameter in model.named_parameters()
        if name.removeprefix("base_model.model.").replace(".base_layer.", ".") in names and not parameter.requires_grad
    )


def nearest_modules(pattern: str, model: nn.Module) -> str | None:
    """Module names similar to a pattern, for a message; None if there are none."""
    names = [name for name, _ in model.named_modules() if name]
    tails = {".".join(name.split(".")[-len(pattern.split(".")) :]) for name in names}
    return ", ".join(get_close_matches(pattern, sorted(tails), 3, cutoff=0.4)) or None


_PIECE = 1 << 24
"""Elements summed at once, since a sum of integers takes 8 bytes for each."""


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A 64-bit number that depends on every bit of the tensors, in their order; of sharded ones, on this rank's
    shard."""
    found = 0
    for tensor in tensors:
        whole = local_part(tensor.detach()).contiguous().flatten()
        bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
        pieces = (bits[start : start + _PIECE] for start in range(0, len(bits), _PIECE))
        sums = [piece.sum(dtype=torch.int64) for piece in pieces]
        for total in torch.stack(sums).tolist() if sums else ():
            found = (found * 1_000_003 + total) % 2**64
    return found
